"""sbjax: 8-bit training of vision-language models in JAX."""

from sbjax.formats import E4M3, E5M2, INT8
from sbjax.fsdp import gather, gather_kernel
from sbjax.fused import norm_dot, norm_mlp
from sbjax.layers import LayerScale, NormDense, NormMLP, SwitchBackDense, SwitchBackLinear
from sbjax.linear import Kernel, quantize_kernel
from sbjax.matmul import scaled_matmul
from sbjax.quantize import Quantized, Spec, dequantize, quantize
from sbjax.quantized_dot import quantized_dot, quantized_dot_general
from sbjax.recipes import RECIPES, Recipe, RecipeRules
from sbjax.rows import Norm
from sbjax.stable_adamw import scale_by_stable_adam, stable_adamw

__version__ = "0.1.0"

__all__ = [
  "E4M3",
  "E5M2",
  "INT8",
  "RECIPES",
  "Kernel",
  "LayerScale",
  "Norm",
  "NormDense",
  "NormMLP",
  "Quantized",
  "Recipe",
  "RecipeRules",
  "Spec",
  "SwitchBackDense",
  "SwitchBackLinear",
  "dequantize",
  "gather",
  "gather_kernel",
  "norm_dot",
  "norm_mlp",
  "quantize",
  "quantize_kernel",
  "quantized_dot",
  "quantized_dot_general",
  "scale_by_stable_adam",
  "scaled_matmul",
  "stable_adamw",
]
