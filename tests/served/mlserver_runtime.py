import work
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse


class Shop(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        (item,) = StringCodec.decode_input(payload.inputs[0])
        if item == "stone":
            raise ValueError("no price")
        answer = StringCodec.encode_output("answer", [work.predict(item)])
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[answer])
