"""Hugging Face configurations: which rotary embedding every layer of a model has."""
