"""A LitServe app whose worker takes several requests at a time, and one whose answers are streams."""

import sys
import time

import litserve


class Shop(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["item"]

    def predict(self, items):
        time.sleep(0.02)
        return [item.upper() for item in items]

    def encode_response(self, answer):
        return {"item": answer}


class Stream(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["item"]

    def predict(self, item):
        for part in item:
            time.sleep(0.001)
            yield part

    def encode_response(self, parts):
        for part in parts:
            yield {"part": part}


if __name__ == "__main__":
    apis = [Shop(api_path="/predict", max_batch_size=4, batch_timeout=0.01), Stream(api_path="/stream", stream=True)]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
