//! A layer that makes up what requests mean.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Insight, IoClass, Kind, Layer, LayerPart, Observer, ObserverPosition,
    OpenContext, Outcome, Request,
};

/// Gives requests insights at random, by a seed.
pub struct WrongHints {
    pub seed: u64,
}

struct WrongHintsQueue(RefCell<fastrand::Rng>);

impl WrongHints {
    pub fn layer(seed: u64) -> Arc<dyn Layer> {
        Arc::new(Self { seed })
    }
}

fn any_kind(random: &mut fastrand::Rng) -> Kind {
    Kind::ALL[random.usize(..Kind::ALL.len())]
}

impl Layer for WrongHints {
    fn name(&self) -> &'static str {
        "wrong-hints"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let random = RefCell::new(fastrand::Rng::with_seed(self.seed));
        Ok(LayerPart::observer(WrongHintsQueue(random)))
    }
}

impl Observer for WrongHintsQueue {
    fn down(&mut self, requests: &mut [Box<Request>], _: ObserverPosition<'_>) {
        let random = self.0.get_mut();
        for request in requests {
            let insight: &mut Insight = &mut request.insight;
            insight.is_unique = random.u8(..6) == 0;
            insight.class = (random.u8(..8) == 0).then_some(IoClass::UNIQUE);
            insight.facts.kind = any_kind(random);
            // Parts that need not fit the request.
            for _ in 0..random.usize(..3) {
                let facts = fathom_block::Facts { kind: any_kind(random), ..Default::default() };
                insight.push(random.u64(1..9000), facts);
            }
        }
    }

    fn up(&mut self, _: &mut [(Box<Request>, Outcome)], _: ObserverPosition<'_>) {}
}
