"""Shapes of models that are not in memory: presets, configurations, checkpoints' headers, factories."""

from __future__ import annotations

from dmuon.models.load import load_shapes
from dmuon.models.presets import preset_names
from dmuon.models.shapes import ModelShapes, ShapeCount, shape_spec

__all__ = ["ModelShapes", "ShapeCount", "load_shapes", "preset_names", "shape_spec"]
