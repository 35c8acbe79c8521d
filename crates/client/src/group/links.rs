//! Connections between the members of a generation, and the measured links.

use super::engine::{Engine, suspect};
use engram_collective::measure::measure;
use engram_collective::transport::{Error, Wait};
use std::collections::HashMap;

impl Engine {
    /// Connects to the members of the generation and measures the links between them, unless it is done.
    pub(super) fn establish(&mut self) -> Result<(), Error> {
        let Some(generation) = self.generation.as_ref().filter(|it| it.members.len() > 1) else { return Ok(()) };
        if self.transport.is_some() {
            return Ok(());
        }
        let mut keep_waiting = suspect(&self.signals, generation);
        let mut wait = Wait::new(self.limit, &generation.cancel, &mut keep_waiting);
        let mut transport = self.connect.connect(generation, &mut wait)?;
        self.network = measure(&mut *transport, generation.number, &mut wait)?;
        self.shared.counters.set_link(&self.network.link);
        (self.transport, self.plans) = (Some(transport), HashMap::new());
        Ok(())
    }
}
