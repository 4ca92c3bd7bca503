"""A tokenizer for tests whose token ids are bytes: what a token's text is shows in its number."""

from __future__ import annotations

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerBackend

from cluster.chat_template import ChatTemplate
from cluster.token_bytes import BYTE_SPELLING
from cluster.tokenizer import Tokenizer
from cluster.vocabulary import Vocabulary

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 258
VOCAB_SIZE = 300  # rows of the logits: more than there are tokens
MAX_MODEL_LEN = 512
# As Qwen 3 ships it, about.
GENERATION_CONFIG = {
    "do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9,
    "transformers_version": "4.51.0",
}  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(max_model_len: int = MAX_MODEL_LEN) -> Tokenizer:
    """Ids 0..255 are bytes, 256..258 special tokens."""
    backend = TokenizerBackend(models.BPE(vocab={BYTE_SPELLING[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    token_bytes = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in SPECIAL_TOKENS)]
    vocabulary = Vocabulary(
        token_bytes=(*token_bytes, *[b""] * (VOCAB_SIZE - len(token_bytes))),
        special_ids=frozenset({256, 257, 258}),
        end_ids=frozenset({END_ID}),
        special_tokens={"eos_token": "<|im_end|>"},
        chat_template=CHATML,
        has_space_prefix=False,
        bos_id=None,
        max_model_len=max_model_len,
        generation_config=GENERATION_CONFIG,
    )
    return Tokenizer(backend, vocabulary)


def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML, {})
