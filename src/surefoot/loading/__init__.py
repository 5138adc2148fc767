"""Files on disk to checked tensors and a tokenizer. Knows file formats; does not run the model."""
