"""Graphs out to ONNX: for Netron, and for any runtime that takes standard operators."""
