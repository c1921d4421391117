"""Choices by law L1: what a request asks for, as the record the native routine reads, and the same routine in numpy as its oracle."""
