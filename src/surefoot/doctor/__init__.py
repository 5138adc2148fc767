"""What is in a checkpoint, and what is wrong with it: files first, then the weights at work. Changes nothing."""
