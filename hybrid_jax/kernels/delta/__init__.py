"""What the Triton kernels of the two delta rules share; kernels.gdn.triton says how such kernels fit together."""
