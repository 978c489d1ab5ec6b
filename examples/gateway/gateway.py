"""Gateway: asks TokenFleet where each request goes, sends it there, and reports how it went.

    python generate.py
    python gateway.py --gateway 127.0.0.1:7500 --model small-chat --tenant acme

It knows TokenFleet by its .proto files alone. For each request: ask Schedule at the origin; on a redirect ask the
site it names, with hop = 1; stream from the engine that was chosen; report started, first token and end.
"""

import argparse
import json
import os
import sys
import time
import uuid
from pathlib import Path

import grpc

from engine import Answer, EngineError, complete
from errors import explained

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "generated"))
try:
    from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
except ImportError as error:
    sys.exit(f"no stubs ({error}): run `python generate.py` first")

SERVICE_CONFIG = HERE.parent.parent / "protos/tokenfleet/wire/v1/service_config.json"
ATTEMPTS_MAX = 3
ASK_TIMEOUT_S = 2.0
REPORT_TRIES_MAX = 5
REPORT_RETRY_S = 0.5


class Gateway:
    """One origin's gateway. `targets` is a gRPC target: HOST:PORT, or ipv4:HOST:PORT,HOST:PORT for several replicas."""

    def __init__(self, targets: str, service_config: str) -> None:
        self.targets = targets
        self.clock = f"example-{uuid.uuid4().hex[:8]}"  # times of one clock may be subtracted by whoever reads them
        token = os.environ.get("TOKENFLEET_TOKEN", "")
        self._shown = (("authorization", f"Bearer {token}"),) if token else None
        self._service_config = service_config
        self._channels: dict[str, grpc.Channel] = {}

    def serve(self, request: decision_pb2.Request, prompt: list[int]) -> bool:
        """One logical request, asked again when a site or an engine fails it. True when it was answered."""
        arrived_s = time.monotonic()
        for attempt in range(ATTEMPTS_MAX):
            request.attempt = attempt
            request.elapsed_s = time.monotonic() - arrived_s
            decision, targets = self.place(request)
            if decision.verdict == decision_pb2.VERDICT_ADMIT:
                if self.run(request, decision, targets, prompt, arrived_s):
                    return True
            elif decision.return_ticket and attempt + 1 < ATTEMPTS_MAX:  # no room now: it keeps its place until then
                again_s = decision.admission.retry_after_s or decision.admission.not_before_s
                print(f"           comes again in {again_s:.1f} s, with its place in line")
                time.sleep(again_s)
                request.return_ticket = decision.return_ticket
                del request.sites_tried[:]
            elif targets == self.targets:  # the origin's word is the last one
                return False
            else:
                request.sites_tried.append(decision.site)
        return False

    def place(self, request: decision_pb2.Request) -> tuple[decision_pb2.Decision, str]:
        """The decision on this attempt, and the gateway of the site that made it: who is told how it went."""
        decision = self.ask(self.targets, request)
        if decision.verdict != decision_pb2.VERDICT_REDIRECT:
            return decision, self.targets
        there = target_of(decision.gateways)
        sent = decision_pb2.Request()
        sent.CopyFrom(request)
        sent.hop, sent.lease = 1, decision.lease
        try:
            return self.ask(there, sent), there
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            print(f"  site {decision.site} does not answer: {explained(error)}")
            return decision, there

    def ask(self, targets: str, request: decision_pb2.Request) -> decision_pb2.Decision:
        stub = scheduler_pb2_grpc.SchedulerStub(self.channel(targets))
        message = scheduler_pb2.ScheduleRequest(request=request)
        decision = stub.Schedule(message, timeout=ASK_TIMEOUT_S, metadata=self._shown).decision
        verdict = decision_pb2.Verdict.Name(decision.verdict).removeprefix("VERDICT_").lower()
        print(f"  {verdict:8} {decision.sentence}")
        if decision.admission.HasField("retry_after_s"):
            print(f"           again in {decision.admission.retry_after_s:.1f} s")
        return decision

    def run(
        self,
        request: decision_pb2.Request,
        decision: decision_pb2.Decision,
        targets: str,
        prompt: list[int],
        arrived_s: float,
    ) -> bool:
        """Stream from the engine and report each step. False when the engine failed."""
        sent_s = time.monotonic()
        answer = Answer()

        def report(kind: int, stop: str = "") -> None:
            self.report(targets, event_of(request, decision, kind, answer, arrived_s, sent_s, self.clock, stop))

        report(outcomes_pb2.OUTCOME_KIND_STARTED)
        try:
            for so_far in complete(decision.address, request.model, prompt, request.max_tokens, answer):
                if so_far.chunks == 1:
                    print(f"           first token of {decision.target} after {so_far.first_token_s - arrived_s:.3f} s")
                    report(outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN)
        except EngineError as error:
            print(f"           failed: {error}")
            report(outcomes_pb2.OUTCOME_KIND_FAILED, "engine")
            return False
        report(outcomes_pb2.OUTCOME_KIND_FINISHED, answer.stop)
        took_s = time.monotonic() - arrived_s
        print(
            f"           finished: {answer.output_tokens} tokens in {took_s:.3f} s, {answer.cached_tokens or 0} cached"
        )
        return True

    def report(self, targets: str, event: outcomes_pb2.OutcomeEvent) -> None:
        """Tell the site that admitted the request. A repeated event does no harm, a lost one does: try again."""
        stub = outcomes_pb2_grpc.OutcomesStub(self.channel(targets))
        for last in [*[False] * (REPORT_TRIES_MAX - 1), True]:
            try:
                events = iter([outcomes_pb2.ReportRequest(events=[event])])
                taken = stub.Report(events, timeout=5.0, metadata=self._shown)
            except grpc.RpcError as error:
                if last or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                time.sleep(REPORT_RETRY_S)
                continue
            for refused in taken.refused:
                print(f"           report refused: {refused.problem}")
            return

    def channel(self, targets: str) -> grpc.Channel:
        """One channel for each site. The service config makes gRPC itself repeat calls that find no replica."""
        if targets not in self._channels:
            options = (("grpc.service_config", self._service_config), ("grpc.enable_retries", 1))
            self._channels[targets] = grpc.insecure_channel(targets, options=options)
        return self._channels[targets]


def event_of(
    request: decision_pb2.Request,
    decision: decision_pb2.Decision,
    kind: int,
    answer: Answer,
    arrived_s: float,
    sent_s: float,
    clock: str,
    stop: str,
) -> outcomes_pb2.OutcomeEvent:
    """What is known at this step. Fields that are absent are unknown; a 0 would be a statement."""
    now_s = time.monotonic()
    event = outcomes_pb2.OutcomeEvent(
        request=request.id,
        attempt=request.attempt,
        kind=kind,
        decision=decision.id,
        tenant=request.tenant,
        request_class=decision.request_class,
        model=request.model,
        origin=decision.origin,
        site=decision.site,
        instance=decision.target,
        elapsed_s=now_s - arrived_s,
        attempt_s=now_s - sent_s,
        prompt_tokens=request.prompt_tokens,
        stop=stop,
        at_wall_s=time.time(),
        clock=clock,
        clock_s=now_s,
    )
    known = {
        "ttft_s": None if answer.first_token_s is None else answer.first_token_s - arrived_s,
        "tpot_s": answer.tpot_s,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
    }
    for name, value in known.items():
        if value is not None:
            setattr(event, name, value)
    return event


def target_of(gateways: list[str]) -> str:
    """One gRPC target for the replicas of a site: all of them where they are addresses, else the first name."""
    numeric = all(gateway.rpartition(":")[0].replace(".", "").isdigit() for gateway in gateways)
    return f"ipv4:{','.join(gateways)}" if numeric else gateways[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask TokenFleet, run the request, report how it went.")
    parser.add_argument("--gateway", required=True, help="HOST:PORT of the origin's decision service")
    parser.add_argument("--model", default="small-chat")
    parser.add_argument("--tenant", default="acme")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--service-config", type=Path, default=SERVICE_CONFIG)
    asked = parser.parse_args()
    service_config = json.dumps(json.loads(asked.service_config.read_text()))
    gateway = Gateway(target_of([asked.gateway]), service_config)
    answered = 0
    for number in range(asked.requests):
        request = decision_pb2.Request(
            id=f"{gateway.clock}-{number}",
            model=asked.model,
            tenant=asked.tenant,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            stream=True,
        )
        print(f"request {request.id}")
        try:
            answered += gateway.serve(request, prompt=list(range(1, asked.prompt_tokens + 1)))
        except grpc.RpcError as error:
            print(f"  no decision: {explained(error)}", file=sys.stderr)
    print(f"{answered} of {asked.requests} requests answered")
    return 0 if answered == asked.requests else 1


if __name__ == "__main__":
    sys.exit(main())
