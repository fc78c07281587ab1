"""Calls inside torch's own control flow, in which no mode can be entered."""

from typing import Any

from functional_jd.torch_compat.private_names import private
from functional_jd.torch_compat.torch_internals import constant_while_tracing


@constant_while_tracing
def control_flow() -> str:
    """The name of torch's control flow whose body the compiler is tracing, such as "scan"; "" where there is none, or
    where torch does not tell.
    """
    try:
        translator: Any = private("_dynamo.symbolic_convert.InstructionTranslator", "control flow")
        tracer: Any = translator.current_tx().output.current_tracer
        while tracer is not None:
            if (name := str(tracer.source_target)) in _CONTROL_FLOW:
                return name
            tracer = tracer.parent
    except (AttributeError, RuntimeError):  # private, and only for a message
        pass
    return ""


_CONTROL_FLOW = ("scan", "cond", "while_loop", "associative_scan", "map_impl")


def refuse_control_flow(where: str) -> None:
    """Refuse to be traced by torch's `scan`, `cond` or `while_loop`, in which no mode can be entered."""
    if name := control_flow():
        raise ValueError(
            f"{where}: expected a call outside of the functions that torch's control flow takes, found one in {name}, "
            "which refuses the modes that derivatives need. Give it what torch.fx.experimental.proxy_tensor.make_fx(f)"
            "(*args) returned before, of an f whose results are clones."
        )
