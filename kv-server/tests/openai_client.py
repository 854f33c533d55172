"""Uses the `openai` client against a server on the hash oracle.

Usage: openai_client.py BASE_URL

Exits with 0 if every answer is what the client's own types promise, else with 1 and the list of
what is not.
"""

import sys
import traceback

import openai

LIMIT_S = 60.0


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def equal(left, right, what):
    expect(left == right, f"{what}: {left!r} is not {right!r}")


def messages(text="Say something."):
    return [{"role": "user", "content": text}]


def models(client, model):
    listed = client.models.list().data
    equal([card.id for card in listed], [model], "models")
    equal(client.models.retrieve(model).id, model, "model")


def chat_whole(client, model):
    answer = client.chat.completions.create(
        model=model, messages=messages(), max_completion_tokens=10, n=2, seed=1, temperature=0
    )
    equal(answer.object, "chat.completion", "object")
    equal([choice.index for choice in answer.choices], [0, 1], "indices")
    for choice in answer.choices:
        equal(choice.message.role, "assistant", "role")
        expect(choice.message.content, "content is empty")
        equal(choice.finish_reason, "length", "finish reason")
    usage = answer.usage
    equal(usage.completion_tokens, 20, "completion tokens")
    equal(usage.total_tokens, usage.prompt_tokens + 20, "total tokens")
    equal(usage.prompt_tokens_details.cached_tokens, 0, "cached tokens")
    expect(answer.created > 1_700_000_000, "created is not a date")
    return answer


def chat_stream(client, model):
    whole = chat_whole(client, model)
    stream = client.chat.completions.create(
        model=model,
        messages=messages(),
        max_completion_tokens=10,
        n=2,
        seed=1,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finishes, usages = ["", ""], [[], []], []
    roles = [None, None]
    for chunk in stream:
        equal(chunk.object, "chat.completion.chunk", "object")
        if chunk.usage is not None:
            equal(chunk.choices, [], "choices of the usage chunk")
            usages.append(chunk.usage)
        for choice in chunk.choices:
            if roles[choice.index] is None:
                equal(choice.delta.role, "assistant", "first role")
                roles[choice.index] = choice.delta.role
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                finishes[choice.index].append(choice.finish_reason)
    equal(texts, [choice.message.content for choice in whole.choices], "streamed texts")
    equal(finishes, [["length"], ["length"]], "one finish reason per choice")
    equal(usages, [whole.usage], "usage")


def chat_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=messages(), max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    equal(len(content), 4, "number of log probabilities")
    text = b"".join(bytes(token.bytes) for token in content).decode()
    equal(text, answer.choices[0].message.content, "text of the tokens")
    expect(all(len(token.top_logprobs) == 2 for token in content), "two alternatives each")


def completion_whole_and_stream(client, model):
    arguments = dict(
        model=model, prompt=["one", "two"], max_tokens=6, n=2, seed=1, extra_body={"ignore_eos": True}
    )
    whole = client.completions.create(**arguments)
    equal(whole.object, "text_completion", "object")
    equal(len(whole.choices), 4, "choices")
    equal(whole.usage.completion_tokens, 24, "completion tokens")
    stream = client.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    texts, usages = [""] * 4, []
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    equal(texts, [choice.text for choice in whole.choices], "streamed texts")
    equal(usages, [whole.usage], "usage")


def stop(client, model):
    def answer(stop):
        return client.completions.create(
            model=model, prompt="Stop this story.", max_tokens=16, temperature=0, stop=stop
        ).choices[0]

    full = answer(None).text
    # From inside one word to inside the next one.
    middle = full.index(" ", 8)
    mark = full[middle - 2 : middle + 2]
    for given in (mark, ["nothing like this", mark]):
        choice = answer(given)
        equal(choice.finish_reason, "stop", "finish reason")
        equal(choice.text, full[: full.index(mark)], "text before the stop string")


def errors(client, model):
    def refused(kind, status, code, **arguments):
        try:
            client.chat.completions.create(**{"model": model, "messages": messages(), **arguments})
        except kind as error:
            equal(error.status_code, status, "status")
            equal(error.code, code, "code")
            expect(error.type, "type is missing")
            return error
        raise AssertionError(f"{arguments} was not refused")

    invalid = "invalid_request_error"
    bad = openai.BadRequestError
    equal(refused(bad, 400, invalid, temperature=9).param, "temperature", "param")
    equal(refused(bad, 400, invalid, n=0).param, "n", "param")
    equal(refused(bad, 400, invalid, messages=[]).param, "messages", "param")
    refused(bad, 400, "context_length_exceeded", max_tokens=1_000_000_000)
    refused(bad, 400, "context_length_exceeded", max_tokens=1_000_000_000, stream=True)
    refused(openai.NotFoundError, 404, "model_not_found", model="no-such-model")


def leave(client, model):
    stream = client.completions.create(model=model, prompt="leave", max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    client.completions.create(model=model, prompt="stay", max_tokens=2)


CHECKS = [
    models,
    chat_whole,
    chat_stream,
    chat_logprobs,
    completion_whole_and_stream,
    stop,
    errors,
    leave,
]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    base = sys.argv[1].rstrip("/")
    if not base.endswith("/v1"):
        base += "/v1"
    failed = 0
    with openai.OpenAI(base_url=base, api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        model = client.models.list().data[0].id
        for check in CHECKS:
            try:
                check(client, model)
                print(f"ok      {check.__name__}")
            except Exception:
                failed += 1
                print(f"FAILED  {check.__name__}")
                traceback.print_exc(file=sys.stdout)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
