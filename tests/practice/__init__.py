"""The code that people bring: one file for each library, or numbered line, with real kernels."""
