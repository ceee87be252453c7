"""Stand-in for SGLang's CUDA kernels, whose wheels need a GPU: on a processor SGLang imports them and calls none."""

from coldsnap_stand_ins import everything_of

__version__ = "0.4.10"
__getattr__ = everything_of("sgl_kernel")
