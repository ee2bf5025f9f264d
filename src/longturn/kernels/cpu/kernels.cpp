// Everything in one unit: both files use the same templates, and compiling those once halves the wait of a first start.
#include "decoder.cpp"
#include "api.cpp"
