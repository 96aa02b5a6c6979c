"""Where weights and tokenizers come from: a packaged model, a local folder, or a model hub that the user names."""
