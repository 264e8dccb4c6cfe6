"""Guesses the roles of a model's tensors from their names and shapes. No JAX here.

It tells which weights are not quantized, which axis of a weight holds its outputs, and which
weights loaders merge into one.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._tensors import CheckpointError, configs_in, shown

AxisChoice = Literal["auto", "first", "last"]
AXIS_CHOICES: tuple[AxisChoice, ...] = ("auto", "first", "last")

# Components of a name are parted by "." or "/". What is small and sensitive: tables of embeddings,
# output layers and heads, norms, routers (a bare "gate" is one in mixture-of-experts models;
# "gate_proj" and GGUF's "ffn_gate" are not, its "ffn_gate_inp" is), biases (of two dimensions in
# Flax attention), the state matrices and short convolutions of state-space models, the vision and
# audio parts of language models with what projects their results into the model, the scales of
# tensors that are quantized already, the states of optimizers (Adam divides by moments that
# rounding would make 0), and what training with qtoolkit keeps: histories, keys, probes.
DEFAULT_SKIP = (
    r"(^|[./])("
    r"[^./]*embe?d[^./]*|([^./]*_)?emb|token_types|wte|wpe|shared(?=[./](weight|embedding)$)"
    r"|([^./]*_)?head|([^./]*_)?classifier|score|qa_outputs|cls|output_layer|lm_loss|pred_layer"
    r"|vocab_(transform|projector)|(generator|discriminator)_predictions|output_projection"
    r"|[^./]*norm[^./]*|([^./]*_)?ln(\d+|_[^./]*)?"
    r"|([^./]*_)?router|(?!ffn_gate([./]|$))([^./]*_)?gate|ffn_gate_inp[^./]*"
    r"|a_log|([^./]*_)?conv1d|dt_bias|qtoolkit(_products)?|opt_states?|optim(izer)?(_states?)?"
    r"|([^./]*_)?(vision|image|video|audio|speech)_(tower|model|encoder|backbone)|vqmodel|vpm|apm"
    r"|vision|visual(_tokenizer)?|vision_language_adapter|patch_merger|([^./]*_)?(aligner|projector)"
    r"|connector|([^./]*_)?resampler|qformer|query_tokens|audio_projection_layer"
    r"|(visual|image|audio|speech|text|language)_projection"
    r"|[^./]*bias[^./]*|([^./]*_)?scales?(_inv|_\d+)?"
    r")([./]|$)"
    # At the root, or at that of a language model in a larger one: "output" is a common name deeper
    # down, as is "proj_out", the head of Whisper, and "decoder", that of ModernBERT; "mlp1" is
    # InternVL's projector, "ff_out" the head of OLMo beside its layers.
    r"|^(language_model[./])?(output|proj_out|decoder)[./](weight|kernel)$"
    r"|^(model[./])?mlp1[./]|(^|[./])transformer[./]ff_out[./]weight$"
)
# Weights that are looked up, not multiplied; "embed_out" is GPT-NeoX's output layer.
EMBEDDING = re.compile(
    r"(^|[./])((?!embed_out)[^./]*embe?d[^./]*|wte|wpe|shared|token_types|relative_attention_bias)"
    r"[./]weight$",
    re.IGNORECASE,
)
SKIPPED = re.compile(DEFAULT_SKIP, re.IGNORECASE)

# Weights that loaders merge into one, hence with one scale for the whole: query, key and value,
# gate and up (in Mixtral w1 and w3, in Nomic's BERT fc11 and fc12), the two compressions of
# DeepSeek's attention, the projections of Qwen's linear attention. In cross-attention, which
# Whisper calls `encoder_attn`, key and value come from the encoder, and the query does not.
# Source: vLLM, the tables `packed_modules_mapping` and `stacked_params_mapping` of its models.
_FUSED = tuple(
    (re.compile(rf"(^|[./])({names})(?=[./])"), merged)
    for names, merged in (
        (r"(?<=encoder_attn[./])[kv]_proj", "kv_proj"),
        (r"(?<!encoder_attn[./])[qkv]_proj", "qkv_proj"),
        (r"w[qkv]", "wqkv"),
        (r"query|key|value", "query_key_value"),
        (r"gate_proj|up_proj", "gate_up_proj"),
        (r"w[13]", "w13"),
        (r"fc1[12]", "fc1"),
        (r"q_a_proj|kv_a_proj_with_mqa", "qkv_a_proj"),
        (r"in_proj_(qkv|z)", "in_proj_qkvz"),
        (r"in_proj_[ab]", "in_proj_ba"),
    )
)
_CONV1D = re.compile(r"(^|\.)(c_attn|c_fc|c_proj|q_attn)\.weight$")
_EXPERTS = re.compile(r"experts[./](gate_up_proj|down_proj|w[123]|gate_proj|up_proj)$")
# Granite and JetMoe store all experts in one tensor [E, out, in], under the name of a single one.
_PARALLEL_EXPERTS = re.compile(r"(^|[./])(input|output)_linear[./]weight$")


def fused_group(name: str) -> str:
    """The name of the tensor into which loaders merge `name`; `name` itself if they do not."""
    for pattern, merged in _FUSED:
        match = pattern.search(name)
        if match:
            return f"{name[: match.start()]}{match[1]}{merged}{name[match.end() :]}"
    return name


def engine_group(name: str) -> str:
    """The layer in which engines join a weight with others, by one scheme: `fused_group`, and for
    all experts of a layer their module; `name` itself if they do not.
    """
    return experts_of(name) or fused_group(name)


def experts_of(name: str, rank: int = 2) -> str:
    """The module of the experts of a layer that has a weight; "" if it is none of an expert.

    Granite's `input_linear` holds all experts if its rank is 3.
    """
    if match := re.match(r"(.*[./])?experts(?=[./])", name):
        return match[0]
    match = _PARALLEL_EXPERTS.search(name) if rank == 3 else None
    return f"{name[: match.start()]}{match[1]}experts" if match else ""


def is_stack_of_experts(tensor: Tensor) -> bool:
    """Whether a tensor has the weights of all experts of a layer, as in Llama 4 and gpt-oss."""
    return len(tensor.shape) == 3 and _EXPERTS.search(tensor.name) is not None


def module_of(name: str) -> str:
    """The module that has a weight: "h.0.attn" of "h.0.attn.weight"."""
    return re.sub(r"[./](weight|kernel)$", "", name)


class Roles:
    """The roles of the tensors of one checkpoint, guessed from all names and shapes together.

    `choice` "first" or "last" fixes the axis of outputs in all weights; "auto" guesses.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], choice: AxisChoice = "auto"
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._choice = choice
        self._has_conv1d = self._finds_conv1d()
        self._by_word: dict[str, list[str]] = {}  # names by their last part
        self._last: dict[str, bool | None] = {}  # by name: each weight is asked for several times

    def outputs_last(self, tensor: Tensor) -> bool | None:
        """Whether the last axes of a weight hold its outputs, not the first; None if not known.

        A bias decides if its length is that of only one of the axes; else the naming convention.
        """
        if tensor.name not in self._last:
            self._last[tensor.name] = self._outputs_last(tensor)
        return self._last[tensor.name]

    def _outputs_last(self, tensor: Tensor) -> bool | None:
        if self._choice != "auto":
            return self._choice == "last"
        last = re.split(r"[./]", tensor.name)[-1]
        if _EXPERTS.search(tensor.name):
            return self._experts_outputs_last(tensor)
        if last == "kernel":
            return True
        if _PARALLEL_EXPERTS.search(tensor.name) and len(tensor.shape) == 3:
            return False
        if _CONV1D.search(tensor.name):
            return self._has_conv1d
        by_bias = self._by_bias(tensor)
        if last == "weight":
            return False if by_bias is None or len(tensor.shape) != 2 else by_bias
        return by_bias

    def has_tied_head(self) -> bool:
        """Whether the output layer of a language model is its table of embeddings.

        Where the config does not say it, models differ: a head that is missing is a tied one.
        """
        said = [part.get("tie_word_embeddings") for part in configs_in(self._config)]
        if True in said:
            return True
        names = map(module_of, self._tensors)
        has_head = any(re.search(r"(^|[./])(lm_head|embed_out|output|head)$", n) for n in names)
        return bool(self._config) and not has_head and False not in said

    def axes(self, tensor: Tensor) -> tuple[int, ...]:
        """The axes of a weight that hold its outputs; raises where nothing says which."""
        last = self.outputs_last(tensor)
        if last is None:
            raise CheckpointError(
                f"tensor {shown(tensor.name)}, {list(tensor.shape)}: cannot tell which axis holds "
                "the outputs, which a scale per channel needs; say it with "
                'channel_axis="first" (as in PyTorch) or channel_axis="last" (as in Flax and '
                'GPT-2), use scaling="tensor", or keep the tensor as it is with skip='
            )
        rank, stack = len(tensor.shape), self._stack_axis(tensor)
        of_all = _EXPERTS.search(tensor.name) or _PARALLEL_EXPERTS.search(tensor.name)
        if of_all and rank == 3:
            return (0, 2) if last else (0, 1)
        if not last:
            return (0,)
        # In Flax's attention kernels [inputs, heads, head length] the last two axes are outputs.
        is_query = re.search(r"(^|[./])(query|key|value)[./]kernel$", tensor.name)
        one = rank - (stack is not None)  # of a layer alone
        outputs = (rank - 2, rank - 1) if one == 3 and is_query else (rank - 1,)
        inputs = [axis for axis in range(rank) if axis not in (stack, *outputs)]
        # Blocks are cut from matrices, so inputs must lie side by side: MaxText's [heads, layers,
        # head length, outputs] have scales for all layers.
        if stack is None or inputs[0] < stack < inputs[-1]:
            return outputs
        return tuple(sorted((stack, *outputs)))

    def _stack_axis(self, tensor: Tensor) -> int | None:
        """The axis along which `nn.scan` or `nnx.vmap` stacked Flax's layers; None for one layer.

        A norm tells it: its `scale` has one axis, and in a stack two. MaxText stacks along axis 1.
        """
        parts = re.split(r"(?<=[./])", tensor.name)
        if len(tensor.shape) < 3 or parts[-1] != "kernel":
            return None
        for end in range(len(parts) - 1, -1, -1):  # from the layer outwards, to the next norm
            around = "".join(parts[:end])
            if scales := self._shapes("scale", around):
                break
        else:
            return None
        kernels = self._shapes("kernel", around)
        for axis in (0, 1):
            lengths = {shape[axis] if len(shape) == 2 else None for shape in scales}
            lengths |= {shape[axis] if len(shape) > 2 else None for shape in kernels}
            if len(lengths) == 1 and None not in lengths:
                return axis
        return None

    def _shapes(self, word: str, around: str) -> list[tuple[int, ...]]:
        """The shapes of the tensors in a module whose name ends with this word."""
        if word not in self._by_word:
            named = ((re.split(r"[./]", name)[-1], name) for name in self._tensors)
            self._by_word[word] = [name for last, name in named if last == word]
        names = (name for name in self._by_word[word] if name.startswith(around))
        return [tuple(self._tensors[name].shape) for name in names]

    def _by_bias(self, tensor: Tensor) -> bool | None:
        bias = self._tensors.get(re.sub(r"[^./]+$", "bias", tensor.name))
        if (
            bias is None
            or bias.name == tensor.name
            or len(bias.shape) != 1
            or len(tensor.shape) < 2
        ):
            return None
        first, last = tensor.shape[0] == bias.shape[0], tensor.shape[-1] == bias.shape[0]
        return None if first == last else last

    def _finds_conv1d(self) -> bool:
        """Whether weights named as GPT-2's are stored as its Conv1D does, [inputs, outputs]."""
        weights = [tensor for tensor in self._tensors.values() if _CONV1D.search(tensor.name)]
        for tensor in weights:
            by_bias = self._by_bias(tensor)
            if by_bias is not None:
                return by_bias
        for (
            tensor
        ) in weights:  # outputs are three times (query, key, value) or four times the inputs
            if len(tensor.shape) == 2 and re.search(r"c_(attn|fc)\.weight$", tensor.name):
                first, last = tensor.shape
                if first != last:
                    return last > first
        return str(self._config.get("model_type", "")) in ("gpt2", "openai-gpt", "imagegpt")

    def _experts_outputs_last(self, tensor: Tensor) -> bool | None:
        """Whether the weights of all experts in one tensor are [E, in, out], as Llama 4 and GPT-OSS
        have them, or [E, out, in]; None if nothing says it.
        """
        if len(tensor.shape) != 3:
            return None
        sizes = (part.get("hidden_size") for part in reversed(configs_in(self._config)))
        hidden = next((size for size in sizes if isinstance(size, int)), None)
        _, first, last = tensor.shape
        is_down = re.search(r"(down_proj|w2)$", tensor.name) is not None
        if hidden is not None and first != last and hidden in (first, last):
            return (last == hidden) == is_down
        bias = self._tensors.get(f"{tensor.name}_bias")
        if bias is not None and len(bias.shape) == 2 and first != last:
            return bias.shape[1] == last
        other = self._tensors.get(tensor.name.replace("gate_up_proj", "down_proj"))
        if other is not None and other.name != tensor.name and len(other.shape) == 3:
            # The two projections are inverse: inputs of one are outputs of the other. The outputs
            # of gate and up together are twice as long.
            in_out = (other.shape[2], 2 * other.shape[1]) == (first, last)
            out_in = (2 * other.shape[2], other.shape[1]) == (first, last)
            return None if in_out == out_in else in_out
        pair = self._tensors.get(tensor.name.replace("down_proj", "gate_up_proj"))
        return self._experts_outputs_last(pair) if pair and pair.name != tensor.name else None
