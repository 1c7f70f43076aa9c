"""The settings of every process, by its name."""

from gateway.settings import GatewaySettings
from gateway.webrtc.settings import WebRtcSettings
from services.aligner.config import AlignerSettings
from services.code2wav.config import Code2WavSettings
from services.common.rpc.settings import Settings
from services.dit.config import DitSettings
from services.embedder.config import EmbedderSettings
from services.encoder.config import EncoderSettings
from services.talker.config import TalkerSettings
from services.thinker.config import ThinkerSettings

PROCESSES: dict[str, type[Settings]] = {
    "thinker": ThinkerSettings,
    "talker": TalkerSettings,
    "code2wav": Code2WavSettings,
    "dit": DitSettings,
    "encoder": EncoderSettings,
    "embedder": EmbedderSettings,
    "aligner": AlignerSettings,
    "gateway": GatewaySettings,
    "webrtc": WebRtcSettings,
}


def required_flags(settings: type[Settings]) -> list[str]:
    """The flags without which it is not read."""
    return [f"--{name}=x" for name, field in settings.model_fields.items() if field.is_required()]
