"""What a model writes, taken apart: reasoning, visible text and tool calls, piece by piece as the text comes."""
