"""From files to modules: the tensor index (`checkpoint`), key to matrix (`linears`), order of loading (`loader`)."""
