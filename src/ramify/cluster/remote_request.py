"""`RemoteRequest`: a request on its way through replicas, and what was delivered of its answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ramify.cluster.codecs import decode_error, encode_params, unpack_floats
from ramify.cluster.wire import Add, AddOptions, End, Output, Welcome, WireError, pack_ids
from ramify.engine.identity import EngineIdentity
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import OutputCollector
from ramify.outputs import (
    CacheReport,
    Completion,
    FinishReason,
    Placement,
    PrefixReport,
    RequestMetrics,
    RequestOutput,
    StepOutput,
    TokenLogprob,
)
from ramify.params import SamplingParams


@dataclass(slots=True)
class AnswerSoFar:
    """What has come of one answer."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class RemoteRequest:
    """A request of a `ClusterLLM`. It knows no connection.

    Args:
        collector: gets its deliveries.
        params: with a seed: a second replica draws the same tokens.
        page_hashes: of the prompt, packed, in each namespace that replicas have.
    """

    def __init__(
        self,
        id_: int,
        collector: OutputCollector,
        ids: array[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        prompt: str | None,
        page_hashes: Sequence[bytes],
        now_s: float,
    ) -> None:
        self.id, self.collector, self.ids, self.params = id_, collector, ids, params
        self.options, self.prompt, self.page_hashes = options, prompt, page_hashes
        self.answers = [AnswerSoFar() for _ in range(params.n)]
        self.is_accepted = self.is_over = self.is_aborted = False
        self.is_placed = False  # a replica was chosen for it once
        self.is_cut_off = False  # its replica has gone, and no other one has it yet
        self.num_resumptions = 0  # since tokens were delivered
        self.num_reroutes = 0  # before
        self.is_resumed = False  # by an engine with another identity, or without `exact`
        self.refused_by: set[str] = set()  # names of replicas, until one has accepted it
        self.wait_until_s: float | None = None  # without a replica; None: it does not wait
        self.only: str | None = None  # name of the replica that it warms; None: any replica
        self.num_new = 0  # tokens of the present replica
        self.key = -1  # on the present connection
        # Of the replica with the first tokens; before them, of the present one.
        self.identity: EngineIdentity | None = None
        self.cache: CacheReport | None = None  # of that replica, too
        self.placement: Placement | None = None  # likewise
        self._arrival_s = now_s
        self._has_prefix = False
        self._is_elsewhere = False  # its tokens may not be those of the first replica

    @property
    def has_tokens(self) -> bool:
        """Whether any token was delivered."""
        return any(answer.token_ids for answer in self.answers)

    @property
    def num_output(self) -> int:
        """Tokens that were delivered, of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def message(self, key: int) -> Add:
        """The message that queues it, with what was delivered."""
        options, generated = self.options, []
        if self.has_tokens:
            generated = [pack_ids(answer.token_ids) for answer in self.answers]
        return Add(
            key,
            pack_ids(self.ids),
            encode_params(self.params),
            AddOptions(
                options.priority,
                options.tenant,
                options.salt,
                options.max_shared,
                options.explain and not self._has_prefix,
                [*options.retention],
                options.cache_share,
                options.pin_share,
                options.session,
            ),
            generated,
        )

    def may_use(self, replica: str) -> bool:
        """Whether it may go to a replica of this name."""
        return self.only in {None, replica}

    def fits(self, welcome: Welcome | None) -> bool:
        """Whether a replica runs the model of the tokens that were delivered."""
        if welcome is None:
            return False
        if not self.has_tokens or self.identity is None:
            return True
        return self.identity.has_same_weights(welcome.identity)

    def begin(self, welcome: Welcome | None) -> None:
        """A replica is going to compute it, from where the last one has stopped."""
        assert welcome is not None
        self.num_new = 0
        if not self.has_tokens:
            self.identity = welcome.identity
        self._is_elsewhere = self.has_tokens and (
            not welcome.identity.exact or welcome.identity != self.identity
        )

    def accept(self) -> None:
        """A replica has queued it; the reader gets its id, once."""
        if not self.is_accepted:
            self.is_accepted = True
            self._deliver(self.id)

    def receive(self, output: Output, now_s: float) -> None:
        """Deliver an increment of a replica.

        Raises:
            WireError: it cannot belong to this request; nothing of it counts.
        """
        self._check(output)
        answer, end = self.answers[output.index], output.end
        reason = output.finish_reason
        if answer.finish_reason is not None:
            if end is None:  # a second replica says again that it has ended
                return
            # Or has gone on with it: an error at the first replica is none at the second.
            output, reason = (
                msgspec.structs.replace(output, token_ids=[], text="", logprobs=[]),
                None,
            )
        elif end is not None:
            reason = reason or end.finish_reasons[output.index]
        self.num_new += len(output.token_ids)
        self.is_resumed |= self._is_elsewhere and bool(output.token_ids)
        answer.token_ids += output.token_ids
        answer.texts.append(output.text)
        answer.logprobs += output.logprobs
        answer.finish_reason = answer.finish_reason or reason
        if end is not None:
            self._end_others(output.index, end.finish_reasons)
        is_first = self.cache is None and output.cache is not None
        if is_first:
            self.cache = output.cache
        has_report = output.prefix is not None and not self._has_prefix
        self._has_prefix |= has_report
        final = None if end is None else self._output(end, now_s)
        self.is_over = final is not None
        self._deliver(
            StepOutput(
                self.id,
                tuple(output.token_ids),
                final,
                output.index,
                output.text,
                tuple(output.logprobs),
                reason,
                output.cache if is_first else None,
                self._placed(output.prefix) if has_report else None,
            )
        )

    def _check(self, output: Output) -> None:
        """Raise WireError unless an increment has a place in this request."""
        num_answers, end = len(self.answers), output.end
        if output.index >= num_answers:
            raise WireError(f"answer {output.index} of a request for {num_answers} answers")
        if end is None:
            return
        if not len(end.finish_reasons) == len(end.stop_reasons) == num_answers:
            raise WireError(
                f"an end with {len(end.finish_reasons)} finish and {len(end.stop_reasons)} stop reasons "
                f"of a request for {num_answers} answers"
            )
        if end.prompt_embedding is not None:
            unpack_floats(end.prompt_embedding)

    def _end_others(self, index: int, reasons: Sequence[FinishReason]) -> None:
        """End every live answer but one, whose increment has the end of the request."""
        for other, (answer, reason) in enumerate(zip(self.answers, reasons, strict=True)):
            if other != index and answer.finish_reason is None:
                answer.finish_reason = reason
                self._deliver(StepOutput(self.id, (), None, other, "", (), reason))

    def _placed(self, report: PrefixReport | None) -> PrefixReport | None:
        return None if report is None else replace(report, placement=self.placement)

    def end_with_error(self, error: Exception, now_s: float) -> None:
        """End with an error: before any output as a refused request of an engine, else as a failed one."""
        if self.has_tokens:
            self._end(FinishReason.ERROR, error, now_s)
        elif not self.is_over:
            self.is_over = True
            self._deliver(error)

    def end_aborted(self, now_s: float) -> None:
        """End the answers that have not ended, as an aborted request of an engine."""
        self._end(FinishReason.ABORT, None, now_s)

    def _end(self, reason: FinishReason, error: Exception | None, now_s: float) -> None:
        if self.is_over:
            return
        ending = [at for at, answer in enumerate(self.answers) if answer.finish_reason is None]
        for index in ending:
            self.answers[index].finish_reason = reason
        report = self.cache or CacheReport(0, 0, 0)
        metrics = RequestMetrics(0.0, None, now_s - self._arrival_s, None)
        completions = tuple(self._completion(answer, None) for answer in self.answers)
        output = RequestOutput(
            self.id,
            self.prompt,
            tuple(self.ids),
            completions,
            metrics,
            report,
            error=error,
            resumed=self.is_resumed,
        )
        self.is_over = True
        # Each answer gets its end; the last end has the output.
        for index in ending[:-1]:
            self._deliver(StepOutput(self.id, (), None, index, "", (), reason))
        last = ending[-1] if ending else len(self.answers) - 1
        self._deliver(StepOutput(self.id, (), output, last, "", (), reason if ending else None))

    def _output(self, end: End, now_s: float) -> RequestOutput:
        completions = tuple(
            self._completion(answer, stop_reason)
            for answer, stop_reason in zip(self.answers, end.stop_reasons, strict=True)
        )
        report, metrics = end.cache, end.metrics
        if self.num_resumptions and self.cache is not None:
            # What the second replica has computed of the prompt was computed before.
            recomputed = end.cache.recomputed_tokens + end.cache.computed_tokens
            report = replace(self.cache, recomputed_tokens=recomputed)
            metrics = replace(metrics, total_s=now_s - self._arrival_s)
        logprobs, embedding = end.prompt_logprobs, end.prompt_embedding
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.ids),
            completions=completions,
            metrics=metrics,
            cache=report,
            prompt_logprobs=None if logprobs is None else tuple(logprobs),
            prompt_embedding=None if embedding is None else unpack_floats(embedding),
            error=None if end.error is None else decode_error(end.error),
            resumed=self.is_resumed,
        )

    def _completion(self, answer: AnswerSoFar, stop_reason: str | int | None) -> Completion:
        assert answer.finish_reason is not None
        return Completion(
            "".join(answer.texts),
            tuple(answer.token_ids),
            answer.finish_reason,
            None if self.params.logprobs is None else tuple(answer.logprobs),
            stop_reason,
        )

    def _deliver(self, delivery: StepOutput | int | Exception) -> None:
        if isinstance(delivery, StepOutput) and self.collector.final_only and not delivery.output:
            return
        self.collector.receive(delivery)
        self.collector.wake()
