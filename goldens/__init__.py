"""Golden vectors: data, how it is generated, read and written. Whatever is stored can be recomputed bit for bit."""
