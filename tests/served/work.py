def predict(name):
    return name.upper()


def after():
    pass
