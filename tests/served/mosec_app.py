import sys

import work
from mosec import Server, ValidationError, Worker


class Prepare(Worker):
    def forward(self, data):
        if "item" not in data:
            raise ValidationError("no item")
        return data["item"]


class Predict(Worker):
    def forward(self, data):
        if "stone" in data:
            raise ValueError("no price")
        return [{"item": work.predict(item)} for item in data]


if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", sys.argv[1]]
    server = Server()
    server.append_worker(Prepare, num=2)
    server.append_worker(Predict, max_batch_size=4, max_wait_time=5)
    server.run()
