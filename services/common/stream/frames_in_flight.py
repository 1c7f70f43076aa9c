"""The bound of the codec frames between a talker and its listener, so that a slow listener stops the talker.

Each queue on the way takes a part of FRAMES_IN_FLIGHT:

1. the talker's engine: all, unread by its servicer
2. the talker's stream: half, waiting for credit
3. the transport: credit for a quarter as many chunks, of at least one frame each
4. code2wav: 4 steps of an eighth (setting max_frames_per_step), whose samples are unread
"""

FRAMES_IN_FLIGHT = 128
