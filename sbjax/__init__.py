"""sbjax: 8-bit training of vision-language models in JAX."""

import sbjax.serialization  # noqa: F401  Names our containers to Flax and JAX.
from sbjax.attention import attention
from sbjax.collage import compensated
from sbjax.dot_general import quantized_dot_general
from sbjax.exchange import quantized_pmean, quantized_psum, quantized_psum_scatter
from sbjax.formats import E4M3, E5M2, INT8
from sbjax.fsdp import gather, gather_weight
from sbjax.fused import layer_norm_dense, layer_norm_mlp
from sbjax.fused_ops import LayerNormParams
from sbjax.layers import LayerNormDense, LayerNormMLP, LayerScale, SwitchBackDense, SwitchBackLinear
from sbjax.linear import QuantizedWeight, quantize_weight
from sbjax.loss_scale import dynamic_loss_scale, fixed_loss_scale
from sbjax.matmul import scaled_matmul
from sbjax.quantize import Quantized, Spec, dequantize, quantize
from sbjax.quantize_model import quantize_model
from sbjax.quantized_dot import quantized_dot
from sbjax.quantized_einsum import quantized_einsum
from sbjax.recipes import RECIPES, Recipe, RecipeRules, fp8_cscale
from sbjax.stable_adamw import scale_by_stable_adam, stable_adamw
from sbjax.state_formats import compress_state

__version__ = "0.1.0"

__all__ = [
  "E4M3",
  "E5M2",
  "INT8",
  "RECIPES",
  "LayerNormDense",
  "LayerNormMLP",
  "LayerNormParams",
  "LayerScale",
  "Quantized",
  "QuantizedWeight",
  "Recipe",
  "RecipeRules",
  "Spec",
  "SwitchBackDense",
  "SwitchBackLinear",
  "attention",
  "compensated",
  "compress_state",
  "dequantize",
  "dynamic_loss_scale",
  "fixed_loss_scale",
  "fp8_cscale",
  "gather",
  "gather_weight",
  "layer_norm_dense",
  "layer_norm_mlp",
  "quantize",
  "quantize_model",
  "quantize_weight",
  "quantized_dot",
  "quantized_dot_general",
  "quantized_einsum",
  "quantized_pmean",
  "quantized_psum",
  "quantized_psum_scatter",
  "scale_by_stable_adam",
  "scaled_matmul",
  "stable_adamw",
]
