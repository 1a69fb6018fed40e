"""Unsupported fields, with remedies (see `body_reader.py`)."""

from engine.frontend.apis.shared.body_reader import EMPTY, Unserved

SHAPE = "leave it out; logit_bias, allowed_token_ids, bad_words and constraints shape an answer"
TEXT_ONLY = "leave it out; this server takes text and token ids"
NO_AUDIO = "audio is not served here: leave it out, or send what is said as text"
NO_BEAMS = "leave it out; n gives several answers"
SESSIONS = "send the whole conversation each time; session_id keeps requests on one worker"

NOT_EVEN_0 = (None,)  # 0 has an effect

SAMPLING = {
    "beam_width": Unserved(NO_BEAMS, (*EMPTY, 1)),
    "custom_params": Unserved(SHAPE),
    "length_penalty": Unserved(NO_BEAMS, (None, 1)),
    "logits_processors": Unserved(SHAPE),
    "prompt_logprobs": Unserved("set return_logprob and logprob_start_len beside sampling_params", NOT_EVEN_0),
    "repetition_detection": Unserved("leave it out; max_new_tokens and repetition_penalty bound repetitions"),
    "spaces_between_special_tokens": Unserved("leave it out; text is shown as the tokenizer decodes it", (None, True)),
    "truncate_prompt_tokens": Unserved("cut the prompt before you send it", NOT_EVEN_0),
    "use_beam_search": Unserved(NO_BEAMS),
    "watermark": Unserved(SHAPE),
    "watermarking": Unserved(SHAPE),
}
REQUEST = {
    **SAMPLING,
    "custom_logit_processor": Unserved(SHAPE),
    "ec_transfer_params": Unserved("leave it out; tandem router pairs workers"),
    "input_embeds": Unserved(TEXT_ONLY),
    "input_ids": Unserved("send token ids to /v1/completions or /generate"),
    "kv_transfer_params": Unserved(
        "leave it out: tandem router, sglang-router and smg pair these workers, vllm-router does not"
    ),
    "logprob_token_ids": Unserved("ask /generate, which has token_ids_logprob"),
    "mm_processor_kwargs": Unserved(TEXT_ONLY),
    "prompt_embeds": Unserved(TEXT_ONLY),
    "prompt_logprobs": Unserved(
        "ask /v1/completions with echo and logprobs, or /generate with return_logprob and logprob_start_len 0",
        NOT_EVEN_0,
    ),
    "repetition_detection": Unserved("leave it out; max_tokens and repetition_penalty bound repetitions"),
    "return_tokens_as_token_ids": Unserved("set return_token_ids instead"),
    "session_params": Unserved(SESSIONS),
    "vllm_xargs": Unserved("leave it out; it is for plugins of vLLM"),
}
COMPLETION = {
    **REQUEST,
    "add_special_tokens": Unserved("send the prompt as token ids to choose them all", (None, True)),
    "input_ids": Unserved("send them as prompt"),
    "suffix": Unserved("leave it out; this server completes at the end alone"),
}
CHAT = {
    **REQUEST,
    "add_special_tokens": Unserved("render the chat yourself and send it to /v1/completions"),
    "audio": Unserved("leave it out; answers are text"),
    "chat_template": Unserved(
        "leave it out, or render the chat yourself and send it to /v1/completions; start the server with another template"
    ),
    "documents": Unserved("give what the template reads in chat_template_kwargs"),
    "echo": Unserved("ask /v1/completions"),
    "functions": Unserved("use tools"),
    "media_io_kwargs": Unserved(TEXT_ONLY),
    "prediction": Unserved("leave it out; answers are the same without"),
    "web_search_options": Unserved("search yourself, with a tool"),
}
GENERATE = {
    "audio_data": Unserved(NO_AUDIO),
    "custom_logit_processor": Unserved(SHAPE),
    "input_embeds": Unserved(TEXT_ONLY),
    "session_params": Unserved(SESSIONS),
    "watermark": Unserved(SHAPE),
}
EMBEDDING = {
    "chat_template": Unserved("render the text yourself"),
    "messages": Unserved("send the text as input"),
    "truncate_prompt_tokens": Unserved("cut the input before you send it", NOT_EVEN_0),
}
