//! Which engines work here, and what of io_uring they find.

use ringway_aio::io_uring::{Feature, probe};
use ringway_disk::EngineKind;
use serde::Serialize;

/// One engine.
#[derive(Debug, Serialize)]
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) usable: bool,
    /// The reason to take it, or why it does not work.
    pub(crate) why: String,
}

/// The parts of io_uring.
#[derive(Debug, Serialize)]
pub(crate) struct Uring {
    /// Why there is none at all.
    pub(crate) error: Option<String>,
    pub(crate) features: Vec<UringFeature>,
}

/// A part of io_uring.
#[derive(Debug, Serialize)]
pub(crate) struct UringFeature {
    pub(crate) name: &'static str,
    pub(crate) state: State,
    /// The first version of Linux that has it.
    pub(crate) since: &'static str,
    /// Why it is not in use.
    pub(crate) why: Option<String>,
}

/// Whether a part is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It is.
    InUse,
    /// Something better is.
    NotNeeded,
    /// That will be seen when a front-end has shared its memory.
    Later,
    /// The kernel does not have it, or refuses.
    Missing,
}

pub(crate) fn list(engines: &[(EngineKind, Result<String, String>)]) -> Vec<Engine> {
    let engine = |(kind, works): &(EngineKind, Result<String, String>)| Engine {
        name: kind.name(),
        usable: works.is_ok(),
        why: works.clone().unwrap_or_else(|why| why),
    };
    engines.iter().map(engine).collect()
}

pub(crate) fn uring() -> Uring {
    let features = match probe() {
        Ok(features) => features,
        Err(error) => return Uring { error: Some(error.to_string()), features: Vec::new() },
    };
    let part = |feature: Feature| {
        let why = features.why_not(feature).map(str::to_owned);
        let (state, why) = match (feature, why) {
            (_, None) => (State::InUse, None),
            // The probe has no memory to register.
            (Feature::RegisteredBuffers, _) => {
                (State::Later, Some("decided when a front-end shares its memory".into()))
            }
            (Feature::CoopTaskrun, why) if features.has(Feature::DeferTaskrun) => {
                (State::NotNeeded, why)
            }
            (_, why) => (State::Missing, why),
        };
        UringFeature { name: feature.name(), state, since: feature.since(), why }
    };
    Uring { error: None, features: Feature::ALL.map(part).into() }
}
