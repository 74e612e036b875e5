"""A small Llama that decodes over `PagedKVCache` through `rope_append_decode`: what `python -m decode_rope demo` runs.

`model` is the forward pass, `attention` reads the pages, `engine` is the server loop, `loading` finds weights and
a tokenizer, `check` holds the greedy decoders it is compared with.
"""
