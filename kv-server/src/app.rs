//! A running server: the socket, the handlers and the engine thread, from start to end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::assembly::{self, AssemblyError, Model};
use crate::config::Config;
use crate::engine_thread::EngineHandle;
use crate::{listen, routes};

/// How long the engine may take to end once it was told to give everything up: one step, and the
/// time for which it waits for copies.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

/// How long last words may take to reach their clients.
const GOODBYE_LIMIT: Duration = Duration::from_secs(2);

/// Why a server could not be started. Nothing was left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Model, pool or engine.
    #[error(transparent)]
    Assembly(#[from] AssemblyError),
    /// The address can't be used.
    #[error("can't listen on --host {host} --port {port}")]
    Listen {
        /// The address or name.
        host: String,
        /// The port.
        port: u16,
        /// What the system said.
        source: io::Error,
    },
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every request was finished.
    Finished,
    /// Requests were given up at the end of the grace; their clients were told.
    GaveUp,
    /// The engine did not come back from its last step in time.
    LeftBehind,
}

/// Ends the engine thread of a server that was dropped instead of shut down.
#[derive(Debug)]
struct EngineGuard(EngineHandle);

impl Drop for EngineGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A server that takes requests. Dropping it gives every request up.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// Tells the task that serves connections to end.
    close: watch::Sender<bool>,
    serving: JoinHandle<()>,
    engine: EngineGuard,
}

impl Server {
    /// Loads the model, starts the engine and listens.
    ///
    /// # Errors
    ///
    /// [`StartError`] names the flag, the file or the address.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        // The address first: it is checked at once, a model takes seconds.
        let listener = bind(config).await?;
        let model = Model::load(config)?;
        Self::with_listener(config, model, listener)
    }

    /// The same with a model that is there already.
    ///
    /// # Errors
    ///
    /// [`StartError`] names the flag or the address.
    pub async fn start_with(config: &Config, model: Model) -> Result<Self, StartError> {
        let listener = bind(config).await?;
        Self::with_listener(config, model, listener)
    }

    fn with_listener(
        config: &Config,
        model: Model,
        listener: TcpListener,
    ) -> Result<Self, StartError> {
        let address = listener
            .local_addr()
            .map_err(|source| listen_error(config, source))?;
        let state = assembly::assemble(config, model)?;
        let engine = EngineGuard(state.engine.clone());
        let (close, mut closed) = watch::channel(false);
        let end = async move {
            // An error means that the server was dropped: an end, too.
            if closed.wait_for(|&closed| closed).await.is_err() {
                tracing::debug!("the server was dropped");
            }
        };
        let app = routes::router(Arc::new(state));
        let serving = tokio::spawn(listen::serve(listener, app, end));
        Ok(Self {
            address,
            engine,
            close,
            serving,
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses new requests, lets the others finish for at most `grace`, tells everybody who is
    /// left, and closes.
    pub async fn shut_down(self, grace: Duration) -> Ended {
        let engine = &self.engine.0;
        engine.drain();
        let mut ended = Ended::Finished;
        if timeout(grace, engine.ended()).await.is_err() {
            ended = Ended::GaveUp;
            engine.abort();
            if timeout(ABORT_LIMIT, engine.ended()).await.is_err() {
                ended = Ended::LeftBehind;
            }
        }
        self.close.send_replace(true);
        let mut serving = self.serving;
        match timeout(GOODBYE_LIMIT, &mut serving).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the listener's task failed"),
            // Connections that a client holds open end with the process.
            Err(_) => serving.abort(),
        }
        ended
    }
}

async fn bind(config: &Config) -> Result<TcpListener, StartError> {
    listen::listen(&config.host, config.port)
        .await
        .map_err(|source| listen_error(config, source))
}

fn listen_error(config: &Config, source: io::Error) -> StartError {
    StartError::Listen {
        host: config.host.clone(),
        port: config.port,
        source,
    }
}
