"""The tools that run here, by name."""

from gateway.answers.gateway import Gateway
from gateway.answers.tools.image import ImageGenerator
from gateway.answers.tools.makers import SoundGenerator, VideoGenerator

TOOLS = {tool.name: tool for tool in (ImageGenerator, VideoGenerator, SoundGenerator)}


def available(gateway: Gateway) -> set[str]:
    """Names of the tools whose output the pipeline has."""
    return {name for name, tool in TOOLS.items() if gateway.pipeline.output(tool.output) is not None}
