"""Storage and execution: formats, codecs, `QuantizedState`, binding and launching of update kernels. Knows no FX."""
