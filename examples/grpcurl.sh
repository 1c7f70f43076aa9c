#!/usr/bin/env bash
# A session with grpcurl (https://github.com/fullstorydev/grpcurl) against stages that run without TLS, started as
# docs/services.md says. Stages have reflection, so no proto files are needed.
set -euo pipefail
thinker=${THINKER:-127.0.0.1:50051}
talker=${TALKER:-127.0.0.1:50052}
dit=${DIT:-127.0.0.1:50054}

# What is there, whether it serves, what it is and how busy it is
grpcurl -plaintext "$thinker" list
grpcurl -plaintext -d '{"service": "quartet.v1.ThinkerService"}' "$thinker" grpc.health.v1.Health/Check
grpcurl -plaintext "$thinker" quartet.v1.ServerInfoService/GetServerInfo
grpcurl -plaintext "$thinker" quartet.v1.ServerInfoService/GetLoad

# Text from the thinker, token by token
grpcurl -plaintext -d '{"start": {"request_id": "curl-1",
  "messages": [{"role": "user", "content": [{"text": "What is seven plus five?"}]}],
  "sampling": {"max_tokens": 32, "temperature": 0}}}' "$thinker" quartet.v1.ThinkerService/Generate

# A text, spoken: codec frames of 80 ms, which code2wav turns into sound
grpcurl -plaintext -d '{"start": {"request_id": "curl-3", "text": {"text": "The old king likes the boat."},
  "sampling": {"max_frames": 20}}}' "$talker" quartet.v1.TalkerService/Speak

# A picture from the diffusion stage: started, progress, pieces in base64, summary
grpcurl -plaintext -max-msg-sz 16777216 -d '{"start": {"request_id": "curl-2", "prompt": "a red circle on a white ground", "seed": 7}}' \
  "$dit" quartet.v1.DitService/Generate
