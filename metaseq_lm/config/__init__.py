"""Every option of the package, in modules that do not import torch, and files of presets."""
