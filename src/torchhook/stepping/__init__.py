"""What an optimizer does to parameters: their values, the gradients it is given, the updates it makes."""
