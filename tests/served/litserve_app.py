import sys

import litserve
import work


class Shop(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["item"]

    def predict(self, item):
        return work.predict(item)

    def encode_response(self, answer):
        return {"item": answer}


class Stream(Shop):
    def predict(self, item):
        yield from item

    def encode_response(self, parts):
        yield from parts


if __name__ == "__main__":
    apis = [Shop(api_path="/predict"), Stream(api_path="/stream", stream=True)]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, num_api_servers=2)
