"""The CPU decoder in C++: `build` compiles it, `packing` lays weights out, `native` calls it through plain C."""
