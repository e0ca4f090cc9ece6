"""Speed: GPU kernels. The rest of the package works without this folder."""
