"""Speed: kernels for a GPU. The rest of the package does not need this folder."""
