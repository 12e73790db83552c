class HeldWeights:
    def tree(self):
        m=self.model_runner.model
        return [f"{n} {type(x).__name__} { {k:tuple(v.shape) for k,v in x._parameters.items() if v is not None} } {getattr(x,'cpu_linear',None)} {getattr(x,'quant_method',None).__class__.__name__}" for n,x in m.named_modules()]
