"""The bound of the codec frames between a talker and its listener.

Each queue on the way takes a part, so that a slow listener stops the talker:

1. the talker's engine: FRAMES_IN_FLIGHT frames that its servicer has not read
2. the talker's stream: half as many frames that wait for credit
3. the transport: credit for a quarter as many chunks, of at least one frame each
4. code2wav: 4 steps of an eighth (setting max_frames_per_step) whose samples are unread
"""

FRAMES_IN_FLIGHT = 128
