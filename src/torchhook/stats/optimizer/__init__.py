"""What an optimizer does to parameters: their values, gradients and updates."""
