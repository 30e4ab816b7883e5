"""Helpers of the length-generalization book: tasks, encodings, attention heads, training, evaluation, theory.

Imports run one way: tasks, encodings → heads, transformer → training → evaluation → theory → claims, plotting.
"""
