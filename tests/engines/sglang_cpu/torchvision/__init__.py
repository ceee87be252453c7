"""Stand-in for torchvision, whose usual wheels are linked against CUDA. Text models only import it."""

from coldsnap_stand_ins import everything_of

__version__ = "0.28.0"
__getattr__ = everything_of("torchvision", submodules=("io", "models", "ops", "transforms", "utils"))
