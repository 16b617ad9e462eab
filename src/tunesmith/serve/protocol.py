"""What clients may ask, in OpenAI's words, and how errors are told. Closed: a field that is not here is refused, and so
is a value that this server would have to ignore."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

Request = TypeVar("Request", bound=BaseModel)


def _as_written(kind: type) -> BeforeValidator:
    """Python takes 0 for False and True for 1; JSON does not."""

    def check(value: Any) -> Any:
        if value is not None and isinstance(value, bool) != (kind is bool):
            raise ValueError(f"it must be {'true or false' if kind is bool else 'a number'}")
        return value

    return BeforeValidator(check)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """It goes to the template as it was written, so it is looked at and not changed."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError("only tools of type function, with their `function`, are known here")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("its function has no `name`")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError("the `parameters` of its function must be a JSON schema, which is an object")
    return tool


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Checks a part of a message's content; what is no text is refused with the prompt, by its type."""
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        raise ValueError("a part of type text needs its `text`, which is a string")
    return part


def _alone(prompts: list[Any]) -> list[Any]:
    """Some clients send a list even of one."""
    if len(prompts) > 1:
        raise ValueError(f"one prompt a request, not {len(prompts)}; send each by itself, at the same time if you like")
    return prompts


def _unbiased(bias: dict[str, float]) -> dict[str, float]:
    if bias:
        raise ValueError("it must be empty or left out; no token is made more or less likely here")
    return bias


Off = Annotated[Literal[False] | None, _as_written(bool)]
One = Annotated[Literal[1] | None, _as_written(int)]
Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class ApiError(Exception):
    """An answer in the shape that clients know errors in."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = Field(None, max_length=10_000)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def is_json(self) -> bool:
        return self.type != "text"


class Common(BaseModel):
    """What both endpoints take. The last ones have one value each that asks for nothing; clients send them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(max_length=200)
    temperature: float | None = Field(1.0, ge=0, le=5, allow_inf_nan=False)
    top_p: float | None = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1000)
    safety_identifier: str | None = Field(None, max_length=1000, description="as `user`: not looked at")
    prompt_cache_key: str | None = Field(None, max_length=1000, description="as `user`: not looked at")
    n: One = 1
    frequency_penalty: Penalty = Field(
        None, description="taken off a token's logit for each time that the answer has it; 0 where left out"
    )
    presence_penalty: Penalty = Field(
        None, description="taken off a token's logit once the answer has it; 0 where left out"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, allow_inf_nan=False,
        description="divides the logits of tokens that the prompt or the answer has; the model's own where left out",
    )  # fmt: skip
    top_k: int | None = Field(
        None, ge=-1, lt=2**31, description="tokens that are drawn from, 0 or -1 for all; the model's own where left out"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, allow_inf_nan=False,
        description="the least share of the likeliest token's probability; the model's own where left out",
    )  # fmt: skip
    logit_bias: Annotated[dict[str, float], AfterValidator(_unbiased)] | None = None

    @property
    def decoding(self) -> dict[str, Any]:
        """What it asks of decoding itself."""
        names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        return asked | ({"top_k": max(0, self.top_k)} if self.top_k is not None else {})

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatMessage(BaseModel):
    """What answers have besides (refusal, annotations) comes back from clients, and says nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[dict[str, Any], AfterValidator(_part)]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: None = Field(None, description="calls are `tool_calls`")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs its content")
        return self


class ChatRequest(Common):
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    tools: Annotated[list[Annotated[dict[str, Any], AfterValidator(_function)]], Field(max_length=1000)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = None
    store: Off = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionRequest(Common):
    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1), AfterValidator(_alone)]
        | Annotated[list[Tokens], Field(min_length=1), AfterValidator(_alone)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Off = False
    best_of: One = 1
    suffix: None = None

    @property
    def one_prompt(self) -> str | list[int]:
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt[0] if is_list else self.prompt  # pyright: ignore[reportReturnType]


class EmbeddingRequest(BaseModel):
    """`dimensions` has one value that asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(max_length=200)
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: None = None
    user: str | None = Field(None, max_length=1000)

    @property
    def texts(self) -> list[str | list[int]]:
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]  # pyright: ignore[reportReturnType]
        return list(self.input)  # pyright: ignore[reportArgumentType]


class LoadRequest(BaseModel):
    """What vLLM's endpoint of the same name takes to load an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str = Field(min_length=1, max_length=100, pattern=r"^[a-zA-Z0-9._-]+$")
    lora_path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")


class UnloadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str = Field(min_length=1, max_length=100)
    lora_int_id: int | None = None


def parse(kind: type[Request], body: bytes) -> Request:
    """The request, or an ApiError that says of the first fault what and where."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = _fault(error)
        if first["type"] == "json_invalid" and "recursion" in first["msg"]:
            raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
        if first["type"] == "json_invalid":
            why = first["msg"].removeprefix("Invalid JSON: ")
            raise ApiError(400, f"The body is no JSON that can be read: {why}.", code="invalid_json") from None
        parts = (kind, ChatMessage, StreamOptions, ResponseFormat, JsonSchema)
        fields = {field.alias or name for part in parts for name, field in part.model_fields.items()}
        names = [str(part) for part in first["loc"] if isinstance(part, int) or part in fields]
        param = ".".join(names) or None
        where = ".".join(str(part) for part in first["loc"][:1])
        said = "it must be left out" if first["type"] == "none_required" else first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"{where[:100]}: this server does not know that field."
        else:
            message = f"{param or where or 'the body'}: {said}."
        raise ApiError(400, message, param=param or where[:100] or None) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _fault(error: ValidationError) -> Any:
    """The first one. Where a field may be of several kinds: what is wrong with the kind that was read furthest."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1] and len(one["loc"]) > 1]
    if len(same) < 2 or same[0]["type"] != "string_type":
        return found[0]
    return max(same, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
