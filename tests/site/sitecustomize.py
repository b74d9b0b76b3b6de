"""Child processes of the tests: prepare for torchvision as the tests themselves do."""

import torchvision_cpu

torchvision_cpu.install()
