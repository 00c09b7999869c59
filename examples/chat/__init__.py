"""A small chat inference service: tokenizer, transformer, continuous batching engine and HTTP server.

Nothing here knows that it may be observed; `configs/chat.yaml` says what is.
"""
