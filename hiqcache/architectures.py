"""Architectures that SGLang serves with other pools than their configuration's keys suggest.

Only a reading without SGLang needs these names (hiqcache/model.py): SGLang decides by lists of its
own, which tests compare with this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NAMES: Mapping[str, str] = {
    "sliding": """
        BeamForCausalLM DiffusionGemmaForBlockDiffusion EmbeddingGemma2Model Gemma4ForCausalLM
        Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM
        GraniteMoeSWAForCausalLM GraniteSWAForCausalLM IQuestQ1ForCausalLM LagunaForCausalLM
        Llama4ForConditionalGeneration MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM
        MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration UnlimitedOCRForCausalLM
    """,
    "linear": """
        FalconH1ForCausalLM InternS2MobiusForConditionalGeneration
        InternS2PreviewForConditionalGeneration JetNemotronForCausalLM
        JetVLMForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
        Lfm2VlForConditionalGeneration MiniCPMV4_6ForConditionalGeneration
        MiniCPMV4_7ForConditionalGeneration NemotronHForCausalLM NemotronHPuzzleForCausalLM
        NemotronH_Omni_Reasoning_V3 Qwen3NextForCausalLM Qwen3_5ForCausalLM
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
        Qwen4ExpForConditionalGeneration ZayaForCausalLM
    """,
    "linear_mla": """
        BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration
        Glm5NextForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM
    """,
    "linear_sliding": "InklingForConditionalGeneration",
    "mla_sliding": "Dots3NoteForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "sparse": "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
    "state": "FalconMambaForCausalLM Mamba2ForCausalLM MambaForCausalLM",
}

#: The family (a key of hiqcache.compatibility.FAMILIES) of each such architecture.
FAMILY_OF: Mapping[str, str] = MappingProxyType(
    {name: family for family, names in _NAMES.items() for name in names.split()}
)
