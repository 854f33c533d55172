//! The table of settings and the three layers above the defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command};

/// One setting: `--name VALUE`, `name = VALUE` in the file, `KV_SERVER_NAME` in the environment.
#[derive(Debug)]
pub struct Setting {
    /// Name of the flag without its dashes.
    pub name: &'static str,
    /// What stands for the value in the help; empty for a switch.
    pub value: &'static str,
    /// The default; empty if there is none.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

macro_rules! settings {
    ($($name:literal $value:literal $default:literal $help:literal;)*) => {
        /// Every setting, in the order of the help.
        pub const SETTINGS: &[Setting] = &[
            $(Setting { name: $name, value: $value, default: $default, help: $help },)*
        ];
    };
}

settings! {
    "model" "PATH|oracle" "" "The model: a GGUF file, or `oracle`";
    "host" "ADDRESS" "127.0.0.1" "Address to listen on";
    "port" "PORT" "8000" "Port to listen on; 0 lets the system choose";
    "gpu-blocks" "N" "512" "KV blocks in the GPU pool";
    "block-tokens" "N" "16" "Tokens per KV block";
    "max-batch-size" "N" "32" "Most sequences that run at the same time";
    "max-tokens-per-step" "N" "2048" "Most tokens in one step, decode rows and prefill chunks";
    "max-seq-len" "N" "" "Most tokens of a sequence, prompt and answer [default: the model's]";
    "prefill-chunk" "N" "512" "Most tokens of one prompt in one step";
    "max-waiting-requests" "N" "1024" "Most requests that wait for admission; 0 is no limit";
    "max-n" "N" "16" "Most choices of one request";
    "kv-swap-mode" "off|sync|async" "sync" "Where a victim's KV goes: dropped, or moved to the host";
    "kv-swap-host-memory-bytes" "SIZE" "512MiB" "Most host memory for parked KV";
    "kv-swap-max-inflight-bytes" "SIZE" "256MiB" "Most bytes being copied at any moment";
    "kv-swap-checksum" "" "false" "Keep a digest of each parked block and verify it before use";
    "kv-swap-max-retries" "N" "2" "Retries of a failed resume before it is computed again";
    "kv-swap-deadline-ms" "N" "30000" "A copy may take that long, plus ten times what its bytes need";
    "kv-swap-max-lost-permille" "N" "100" "Stop swapping for good when more of the blocks or slots is lost";
    "no-kv-swap-sync-fallback" "" "false" "Don't start if the asynchronous backend can't be set up";
    "victim" "newest|oldest|cost" "newest" "Who leaves when blocks are short";
    "lookahead-tokens" "N" "" "Move victims when fewer free tokens per sequence are left [default: 4 with async, else 0]";
    "resume-slack-tokens" "N" "16" "Resume a parked group when everybody could take that many tokens";
    "watermark-permille" "N" "20" "Thousandths of the pool that admission leaves free for growth";
    "slice-ms" "N" "0" "Groups that ran this long make room for those who wait; 0 is run to the end [async only]";
    "max-swaps" "N" "1000" "How often a group is moved for the sake of slices";
    "priority-aging-ms" "N" "10000" "Waiting this long makes a request one priority more urgent";
    "shutdown-grace" "TIME" "30s" "How long running requests may go on after SIGTERM or Ctrl-C";
    "threads" "N" "" "Threads that run the model [default: the machine's cores]";
    "max-body-bytes" "SIZE" "4MiB" "Longest request body";
    "log" "FILTER" "info" "What to log on stderr";
    "oracle-layers" "N" "4" "Layers of the oracle";
    "oracle-token-bytes" "N" "64" "Bytes of KV per token and layer of the oracle";
    "host-link-bandwidth" "SIZE" "" "Test aid: imitate a link of that many bytes per second [plain memory]";
    "host-link-delay-ms" "N" "0" "Test aid: add that much to each copy [plain memory]";
    "fault-injection" "" "false" "Test aid: allow the faults below; never where people are served";
    "fault-copy-delay-ms" "N" "0" "Fault: the end of each copy is seen that much later";
    "fault-fail-copy" "N[,N...]" "" "Fault: these copies fail, counted from 1";
    "fault-lose-copy" "N" "" "Fault: nobody hears of the end of this copy";
    "fault-repeat-completion" "N" "" "Fault: the end of this copy is told twice";
    "fault-flip-host-bit" "N" "" "Fault: after so many copies out, a bit of a host slot flips";
    "fault-step-error" "N" "" "Fault: this step fails, counted from 1";
    "fault-force-swap-every" "N" "" "Fault: a group is swapped out after every N of its tokens";
}

/// Prefix of the environment variables.
const ENVIRONMENT: &str = "KV_SERVER_";

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    Default,
    /// This environment variable.
    Environment(String),
    /// This file.
    File(PathBuf),
    /// The command line.
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => write!(f, " (the default)"),
            Self::Environment(name) => write!(f, " (from {name})"),
            Self::File(path) => write!(f, " (from {})", path.display()),
            Self::Flag => Ok(()),
        }
    }
}

/// Why the configuration was refused. Nothing was started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value outside what is allowed.
    #[error("--{name} is {value:?}{from}, must be {allowed}")]
    Wrong {
        /// The flag without its dashes.
        name: String,
        /// The value as given.
        value: String,
        /// Where it came from.
        from: Source,
        /// What is allowed.
        allowed: String,
    },
    /// The command line has something that is not a flag of ours.
    #[error("{0}")]
    Usage(String),
    /// The file can't be read.
    #[error("--config {path:?} can't be read")]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("--config {path:?} is not valid TOML: {what}")]
    Toml {
        /// Which file.
        path: PathBuf,
        /// What the parser said.
        what: String,
    },
    /// The file or the environment names a setting that doesn't exist.
    #[error("{what} is not a setting{from}; {hint}")]
    Unknown {
        /// The name.
        what: String,
        /// Where it stands.
        from: Source,
        /// The closest settings.
        hint: String,
    },
}

/// One value and its origin.
#[derive(Debug)]
struct Given {
    value: String,
    from: Source,
}

/// What the command line asked for.
pub(super) enum Flags {
    Print(String),
    Read { file: Option<String> },
}

/// The values that somebody gave. A layer that is read later never replaces an earlier one, so
/// the strongest comes first.
#[derive(Debug)]
pub(crate) struct Layers {
    given: BTreeMap<&'static str, Given>,
    config_file: Option<String>,
}

impl Layers {
    pub(super) const fn new() -> Self {
        Self {
            given: BTreeMap::new(),
            config_file: None,
        }
    }

    pub(super) fn read_flags(
        &mut self,
        args: impl IntoIterator<Item = String>,
    ) -> Result<Flags, ConfigError> {
        let matches = match command().try_get_matches_from(args) {
            Ok(matches) => matches,
            Err(error) if error.use_stderr() => {
                let text = error.to_string();
                return Err(ConfigError::Usage(
                    text.trim_start_matches("error: ").to_owned(),
                ));
            }
            Err(help) => return Ok(Flags::Print(help.to_string())),
        };
        for setting in SETTINGS {
            if let Some(value) = matches.get_one::<String>(setting.name) {
                self.give(setting.name, value.clone(), Source::Flag);
            }
        }
        Ok(Flags::Read {
            file: matches.get_one::<String>("config").cloned(),
        })
    }

    pub(super) fn read_environment(
        &mut self,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(), ConfigError> {
        for (variable, value) in environment {
            let Some(rest) = variable.strip_prefix(ENVIRONMENT) else {
                continue;
            };
            let name = rest.to_ascii_lowercase().replace('_', "-");
            if name == "config" {
                self.config_file = Some(value);
                continue;
            }
            match find(&name) {
                Some(name) => self.give(name, value, Source::Environment(variable)),
                None => {
                    let what = format!("{name:?}");
                    return Err(unknown(&what, &name, Source::Environment(variable)));
                }
            }
        }
        Ok(())
    }

    /// The file that `KV_SERVER_CONFIG` names.
    pub(super) fn file_from_environment(&self) -> Option<String> {
        self.config_file.clone()
    }

    pub(super) fn read_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::File {
            path: path.to_owned(),
            source,
        })?;
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let what = error.to_string().trim_end().to_owned();
            ConfigError::Toml {
                path: path.to_owned(),
                what,
            }
        })?;
        for (key, value) in table {
            let from = Source::File(path.to_owned());
            let Some(name) = find(&key.replace('_', "-")) else {
                return Err(unknown(&format!("{key:?}"), &key.replace('_', "-"), from));
            };
            let value = match value {
                toml::Value::String(text) => text,
                toml::Value::Boolean(value) => value.to_string(),
                toml::Value::Float(value) => value.to_string(),
                toml::Value::Integer(value) => value.to_string(),
                toml::Value::Array(_) | toml::Value::Datetime(_) | toml::Value::Table(_) => {
                    return Err(ConfigError::Wrong {
                        name: name.to_owned(),
                        value: value.type_str().to_owned(),
                        from,
                        allowed: "a string, a number or a boolean".to_owned(),
                    });
                }
            };
            self.give(name, value, from);
        }
        Ok(())
    }

    fn give(&mut self, name: &'static str, value: String, from: Source) {
        self.given.entry(name).or_insert(Given { value, from });
    }

    /// The value as text: what somebody gave, or the default.
    pub(super) fn text(&self, name: &str) -> &str {
        match self.given.get(name) {
            Some(given) => given.value.trim(),
            None => {
                SETTINGS
                    .iter()
                    .find(|setting| setting.name == name)
                    .expect("only settings of the table are asked for")
                    .default
            }
        }
    }

    /// Reads a value; `parse` says `None` to what is not allowed.
    pub(crate) fn read<T>(
        &self,
        name: &str,
        allowed: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        parse(self.text(name)).ok_or_else(|| self.wrong(name, allowed))
    }

    /// A number of things, at least one.
    pub(crate) fn count(&self, name: &str) -> Result<u32, ConfigError> {
        self.read(
            name,
            "a whole number from 1 to 4294967295",
            kind::number(1..=u32::MAX),
        )
    }

    /// A setting that nobody needs to give.
    pub(crate) fn optional<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Self, &str) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        if self.given.contains_key(name) {
            read(self, name).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Whether anybody gave it.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    pub(crate) fn wrong(&self, name: &str, allowed: &str) -> ConfigError {
        let from = self
            .given
            .get(name)
            .map_or(Source::Default, |given| given.from.clone());
        ConfigError::Wrong {
            name: name.to_owned(),
            value: self.text(name).to_owned(),
            from,
            allowed: allowed.to_owned(),
        }
    }
}

fn find(name: &str) -> Option<&'static str> {
    SETTINGS
        .iter()
        .map(|setting| setting.name)
        .find(|&known| known == name)
}

/// Names the settings that share a word with the unknown one, or all of them.
fn unknown(what: &str, name: &str, from: Source) -> ConfigError {
    let close: Vec<_> = SETTINGS
        .iter()
        .map(|setting| setting.name)
        .filter(|known| {
            known
                .split('-')
                .any(|word| word.len() > 2 && name.contains(word))
        })
        .collect();
    let hint = if close.is_empty() {
        let all: Vec<_> = SETTINGS.iter().map(|setting| setting.name).collect();
        format!("known are {}", all.join(", "))
    } else {
        format!("similar are {}", close.join(", "))
    };
    ConfigError::Unknown {
        what: what.to_owned(),
        from,
        hint,
    }
}

fn command() -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .help("TOML file with the same names; weaker than the environment and the flags");
    let flags = SETTINGS.iter().map(|setting| {
        let default = match setting.default {
            "" | "false" => String::new(),
            default => format!(" [default: {default}]"),
        };
        let arg = Arg::new(setting.name)
            .long(setting.name)
            .action(ArgAction::Set)
            .allow_hyphen_values(true)
            .help(format!("{}{default}", setting.help));
        if setting.value.is_empty() {
            arg.num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_name("true|false")
        } else {
            arg.value_name(setting.value)
        }
    });
    Command::new("kv-server")
        .about("OpenAI-compatible server that moves groups of sequences to host memory and back")
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(
            "Each setting can also be given in the file of --config and as an environment \
             variable: KV_SERVER_GPU_BLOCKS for --gpu-blocks.\n\
             Order: defaults, then the file, then the environment, then flags.",
        )
        .arg(config)
        .args(flags)
}

/// How values are read from text. `None` means that the value is not allowed.
pub(crate) mod kind {
    use std::ops::RangeInclusive;
    use std::str::FromStr;
    use std::time::Duration;

    use crate::config::SwapMode;

    /// A whole number in a range.
    pub(crate) fn number<T: FromStr + PartialOrd>(
        range: RangeInclusive<T>,
    ) -> impl Fn(&str) -> Option<T> {
        move |text| text.parse().ok().filter(|number| range.contains(number))
    }

    /// Bytes, plain or with a unit such as `MiB` or `GB`.
    pub(crate) fn size(text: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let size = text.parse::<bytesize::ByteSize>().ok()?.as_u64();
        range.contains(&size).then_some(size)
    }

    /// Seconds, or a number with `ms` or `s`; at most a day.
    pub(crate) fn duration(text: &str) -> Option<Duration> {
        let millis = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
            (Some(millis), _) => millis.trim().parse::<u64>().ok()?,
            (None, Some(secs)) => secs.trim().parse::<u64>().ok()?.checked_mul(1000)?,
            (None, None) => text.parse::<u64>().ok()?.checked_mul(1000)?,
        };
        (millis <= 86_400_000).then(|| Duration::from_millis(millis))
    }

    pub(crate) fn switch(text: &str) -> Option<bool> {
        text.parse().ok()
    }

    pub(crate) fn swap_mode(text: &str) -> Option<SwapMode> {
        match text {
            "async" => Some(SwapMode::Async),
            "off" => Some(SwapMode::Off),
            "sync" => Some(SwapMode::Sync),
            _ => None,
        }
    }
}
