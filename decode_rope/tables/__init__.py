"""Rotary tables: `RopeTable`, the frequencies of every rope type, axis maps, and how exact a table is."""

from .table import Exactness, RopeTable, frequencies, rows

__all__ = ["Exactness", "RopeTable", "frequencies", "rows"]
