//! Engine and block size: what was asked for, and what works.

use super::{OpenError, OpenOptions};
use crate::choices::{CacheMode, EngineKind};
use std::path::Path;

/// Refuses a block size that no guest is shown.
pub(super) fn check_block_size(size: u32) -> Result<(), OpenError> {
    match size {
        512 | 4096 => Ok(()),
        _ => Err(OpenError::BlockSize { size, why: "it must be 512 or 4096".into() }),
    }
}

/// Refuses an engine that cannot work whatever the disk is.
pub(super) fn check_engine(options: &OpenOptions) -> Result<(), OpenError> {
    let Some(engine) = options.engine else { return Ok(()) };
    let cache = options.cache.filter(|&mode| mode != CacheMode::None && engine.needs_direct());
    let why = if engine == EngineKind::Null {
        "it would lose every write; it serves null:SIZE only".into()
    } else if engine == EngineKind::Nvme {
        "it serves the generic character devices of NVMe namespaces only: name one, such as \
         /dev/ng0n1 for the namespace whose block device is /dev/nvme0n1"
            .into()
    } else if let Some(cache) = cache {
        format!(
            "it needs O_DIRECT (--cache none), not --cache {cache}: without it the kernel carries \
             each request out while it is submitted"
        )
    } else {
        match options.engines.iter().find(|(kind, _)| *kind == engine) {
            Some((_, Ok(_))) => return Ok(()),
            Some((_, Err(why))) => why.clone(),
            None => "it is not built in".into(),
        }
    };
    Err(OpenError::Engine { engine, why })
}

/// The engine that was asked for, or the best one that works here for this file.
pub(super) fn choose_engine(
    path: &Path,
    options: &OpenOptions,
    direct: bool,
) -> Result<(EngineKind, String), OpenError> {
    match options.engine {
        Some(engine) if engine.needs_direct() && !direct => Err(OpenError::Engine {
            engine,
            why: format!("it needs O_DIRECT, which does not work on {}", path.display()),
        }),
        Some(engine) => Ok((engine, "as asked".into())),
        None => options
            .engines
            .iter()
            .filter(|(engine, _)| direct || !engine.needs_direct())
            .find_map(|(engine, works)| works.as_ref().ok().map(|why| (*engine, why.clone())))
            .ok_or_else(|| OpenError::Engine {
                engine: EngineKind::Threads,
                why: "this host offers no engine at all".into(),
            }),
    }
}
