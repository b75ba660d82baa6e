"""Every option of the package, in modules that do not import torch; their files of presets."""
