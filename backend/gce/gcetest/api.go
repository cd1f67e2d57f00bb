// SPDX-License-Identifier: Apache-2.0

package gcetest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
)

const root = "https://www.googleapis.com/compute/v1/" // beginning of the URLs of all resources

// ServeHTTP implements http.Handler: the Compute API below /compute/v1/, and the call of the
// Resource Manager API that asks for permissions.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applyDue()
	_, pattern := s.mux.Handler(r)
	name := names()[pattern]
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	answer, f := s.answer(r, name)
	if problem := s.check(r, name, body, answer, f); problem != nil {
		f = failed(http.StatusBadRequest, "notInTheDescription", "%v", problem)
	}

	call := Call{Name: name}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	if f != nil {
		call.Reason = f.reason
		w.WriteHeader(f.status)
		answer = map[string]any{"error": map[string]any{
			"code": f.status, "message": f.message, "errors": []any{map[string]string{"message": f.message, "domain": "global", "reason": f.reason}},
		}}
	}
	s.calls = append(s.calls, call)
	_ = json.NewEncoder(w).Encode(answer)
}

// check holds a call and its answer against the description of the API. An answer with an error is not checked, and
// neither are calls that the description of the Compute API at hand does not have.
func (s *Server) check(r *http.Request, name string, body []byte, answer any, f *failure) error {
	if slices.Contains([]string{"", "projects.testIamPermissions"}, name) {
		return nil
	}
	if err := s.description.CheckQuery(name, r.URL.Query()); err != nil {
		return err
	}
	var request, tree any
	if len(body) > 0 {
		request = schema.JSON(json.RawMessage(body))
	}
	if f == nil {
		tree = schema.JSON(answer)
	}
	return s.description.Check(name, request, tree)
}

// names returns the names of the known calls in the words of the API, by their patterns for a http.ServeMux.
func names() map[string]string {
	const project = "/compute/v1/projects/" + Project
	const instance = project + "/zones/" + Zone + "/instances/{name}"
	return map[string]string{
		"POST /v3/projects/" + Project + ":testIamPermissions": "projects.testIamPermissions",
		"GET " + instance:                              "instances.get",
		"POST " + instance + "/testIamPermissions":     "instances.testIamPermissions",
		"GET " + project + "/global/routes":            "routes.list",
		"POST " + project + "/global/routes":           "routes.insert",
		"DELETE " + project + "/global/routes/{name}":  "routes.delete",
		"GET " + project + "/global/operations/{name}": "globalOperations.get",
	}
}

// permissions returns the permissions that a call needs, or none if the call is unknown.
func permissions(name string) []string {
	return map[string][]string{
		"instances.get":        {"compute.instances.get"},
		"routes.list":          {"compute.routes.list"},
		"routes.insert":        {"compute.routes.create", "compute.networks.updatePolicy", "compute.instances.use"},
		"routes.delete":        {"compute.routes.delete", "compute.networks.updatePolicy"},
		"globalOperations.get": {"compute.globalOperations.get"},
	}[name]
}

// scopes returns access scopes without their common beginning, Scope. A call needs one of them.
func scopes(r *http.Request, name string) []string {
	switch {
	case name == "projects.testIamPermissions":
		return []string{"cloud-platform", "cloudplatformprojects", "cloudplatformprojects.readonly"}
	case r.Method == http.MethodGet || name == "instances.testIamPermissions":
		return []string{"cloud-platform", "compute", "compute.readonly"}
	}
	return []string{"cloud-platform", "compute"}
}

// mayCall reports whether the token of the instance has an access scope for a call.
func (i Instance) mayCall(r *http.Request, name string) bool {
	return slices.ContainsFunc(scopes(r, name), func(scope string) bool { return slices.Contains(i.Scopes, Scope+scope) })
}

func (s *Server) answer(r *http.Request, name string) (any, *failure) {
	caller, valid := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "+s.bearer(""))
	switch {
	case s.away:
		return nil, failed(http.StatusServiceUnavailable, "backendError", "The service is currently unavailable.")
	case !valid:
		return nil, failed(http.StatusUnauthorized, "authError", "Request had invalid authentication credentials.")
	case name != "" && !s.instances[caller].mayCall(r, name):
		return nil, failed(http.StatusForbidden, "insufficientPermissions", "Request had insufficient authentication scopes.")
	case name == "":
		return nil, failed(http.StatusNotFound, "notFound", "%s %s was not found", r.Method, r.URL.Path)
	case s.throttled > 0:
		s.throttled--
		return nil, failed(http.StatusForbidden, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'compute.googleapis.com'.")
	case name == "projects.testIamPermissions" && s.noManager:
		return nil, failed(http.StatusForbidden, "accessNotConfigured", "Cloud Resource Manager API has not been used in project %s before or it is disabled.", Number)
	}

	for _, p := range permissions(name) {
		if s.denied[p] {
			return nil, failed(http.StatusForbidden, "forbidden", "Required '%s' permission for '%s'", p, strings.TrimPrefix(r.URL.Path, "/compute/v1/"))
		}
	}

	last := path.Base(r.URL.Path)
	switch name {
	case "projects.testIamPermissions", "instances.testIamPermissions":
		return s.testPermissions(r)
	case "instances.get":
		return s.getInstance(last)
	case "routes.list":
		return s.listRoutes(r)
	case "routes.insert":
		return s.insert(r)
	case "routes.delete":
		return s.delete(last)
	default:
		return s.getOperation(last)
	}
}

func (s *Server) testPermissions(r *http.Request) (any, *failure) {
	var asked struct {
		Permissions []string `json:"permissions"`
	}
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		return nil, failed(http.StatusBadRequest, "badRequest", "%v", err)
	}
	asked.Permissions = slices.DeleteFunc(asked.Permissions, func(p string) bool { return s.denied[p] })
	return asked, nil
}

func (s *Server) getInstance(name string) (any, *failure) {
	i, ok := s.instances[name]
	if !ok {
		return nil, failed(http.StatusNotFound, "notFound", "The resource '%s' was not found", Instance{Name: name}.url())
	}
	return i.describe(), nil
}

// describe returns the instance in the form of the API.
func (i Instance) describe() map[string]any {
	n := map[string]any{"name": "nic0", "network": root + NetworkURL(i.Network)}
	for _, a := range i.Addresses {
		n[map[bool]string{true: "networkIP", false: "ipv6Address"}[a.Is4()]] = a.String()
	}
	status := map[bool]string{true: "TERMINATED", false: "RUNNING"}[i.Stopped]
	return map[string]any{
		"name": i.Name, "zone": root + "projects/" + Project + "/zones/" + Zone, "status": status, "canIpForward": i.CanIPForward, "networkInterfaces": []any{n},
	}
}

// cut returns a page of items, and the token of the next one. The token is empty after the last
// page.
func (s *Server) cut(r *http.Request, items []any) (page []any, next string, f *failure) {
	begin, _ := strconv.Atoi(r.FormValue("pageToken"))
	size, err := strconv.Atoi(cmp.Or(r.FormValue("maxResults"), "500"))
	if err != nil || size > 500 {
		return nil, "", failed(http.StatusBadRequest, "invalid", "Invalid value for field 'maxResults'.")
	}
	end := min(begin+min(size, s.pageSize), len(items))
	if end < len(items) {
		next = strconv.Itoa(end)
	}
	return items[min(begin, end):end], next, nil
}

// filter returns the syntax of the only filter for routes that the server knows.
func filter() *regexp.Regexp { return regexp.MustCompile(`^network eq "([^"]*)"$`) }

// spelled returns a destination as the API may spell it: an IPv6 address without the abbreviation
// :: of zeros.
func spelled(dst string) string {
	p, err := netip.ParsePrefix(dst)
	if err != nil || p.Addr().Is4() {
		return dst
	}
	var words []string
	for b := p.Addr().As16(); len(words) < 8; {
		i := 2 * len(words)
		words = append(words, strconv.FormatUint(uint64(b[i])<<8|uint64(b[i+1]), 16))
	}
	return fmt.Sprintf("%s/%d", strings.Join(words, ":"), p.Bits())
}

func (s *Server) listRoutes(r *http.Request) (any, *failure) {
	matching := []any{}
	text := r.FormValue("filter")
	f := filter().FindStringSubmatch(text)
	if f == nil {
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'filter': '%s'.", text)
	}

	for _, route := range s.routes {
		ok, err := regexp.MatchString("^("+f[1]+")$", root+route.Network)
		if err != nil {
			return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'filter': '%s'.", text)
		}
		if !ok {
			continue
		}

		route.DestRange = spelled(route.DestRange)
		if w := s.warning(route); w != "" {
			route.Warnings = []Warning{{w}}
		}

		for _, url := range []*string{&route.Network, &route.Instance, &route.Gateway, &route.LocalNet} {
			if *url != "" {
				*url = root + *url
			}
		}
		matching = append(matching, route)
	}

	page, next, failure := s.cut(r, matching)
	answer := map[string]any{"kind": "compute#routeList", "items": page}
	if next != "" {
		answer["nextPageToken"] = next
	}
	return answer, failure
}

func (s *Server) insert(r *http.Request) (any, *failure) {
	var route Route
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&route); err != nil {
		return nil, failed(http.StatusBadRequest, "badRequest", "%v", err)
	}

	for _, url := range []*string{&route.Network, &route.Instance} {
		*url = strings.TrimPrefix(*url, root)
	}
	dst, err := netip.ParsePrefix(route.DestRange)
	target, exists := s.instances[path.Base(route.Instance)]
	switch {
	case !regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`).MatchString(route.Name):
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.name': '%s'.", route.Name)
	case err != nil || dst != dst.Masked():
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.destRange': '%s'.", route.DestRange)
	case prefixInside(dst, NetworkRange()):
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.destRange': '%s'. %s hides the reserved address space for network (%s).", dst, dst, NetworkRange())
	case route.Priority < 0 || route.Priority > 65535 || route.Type != "" || route.Warnings != nil:
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for a field of 'resource'.")
	case !exists || route.Instance != target.url():
		return nil, failed(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.nextHopInstance': '%s'. The referenced instance resource cannot be found.", route.Instance)
	case slices.ContainsFunc(s.routes, func(have Route) bool { return have.Name == route.Name }) || s.changing(route.Name):
		return nil, failed(http.StatusConflict, "alreadyExists", "The resource 'projects/%s/global/routes/%s' already exists", Project, route.Name)
	}

	network := path.Base(route.Network)
	full := func() *failure {
		if s.count(network) >= s.quota {
			return failed(http.StatusForbidden, "quotaExceeded", "Quota 'ROUTES' exceeded.  Limit: %d.0 globally.", s.quota)
		}
		return nil
	}
	if f := full(); f != nil && !s.lateQuota {
		return nil, f
	}

	route.Type = "STATIC"
	return s.begin(route.Name, func() *failure {
		if f := full(); f != nil {
			f.reason = "QUOTA_EXCEEDED"
			return f
		}
		s.routes = append(s.routes, route)
		return nil
	}), nil
}

// prefixInside reports whether p is equal to outer or a part of it.
func prefixInside(p, outer netip.Prefix) bool {
	return p.Overlaps(outer) && p.Bits() >= outer.Bits()
}

func (s *Server) delete(name string) (any, *failure) {
	named := func(r Route) bool { return r.Name == name }
	if !slices.ContainsFunc(s.routes, named) {
		return nil, failed(http.StatusNotFound, "notFound", "The resource 'projects/%s/global/routes/%s' was not found", Project, name)
	}
	if s.changing(name) {
		return nil, failed(http.StatusBadRequest, "resourceNotReady", "The resource 'projects/%s/global/routes/%s' is not ready", Project, name)
	}
	return s.begin(name, func() *failure {
		s.routes = slices.DeleteFunc(s.routes, named)
		return nil
	}), nil
}

// changing reports whether an operation on the route is in progress.
func (s *Server) changing(route string) bool {
	return slices.ContainsFunc(s.operations, func(op *operation) bool { return op.route == route && op.apply != nil })
}

// begin begins an operation on a route, and returns its description.
func (s *Server) begin(route string, apply func() *failure) any {
	op := &operation{name: fmt.Sprintf("operation-%d", len(s.operations)+1), route: route, apply: apply, at: time.Now().Add(s.delay)}
	s.operations = append(s.operations, op)
	return map[string]any{"kind": "compute#operation", "name": op.name, "status": "PENDING"}
}

func (s *Server) getOperation(name string) (any, *failure) {
	for _, op := range s.operations {
		if op.name != name {
			continue
		}
		answer := map[string]any{"kind": "compute#operation", "name": op.name, "status": "RUNNING"}
		if op.apply == nil {
			answer["status"] = "DONE"
		}
		if op.failed != nil {
			answer["httpErrorStatusCode"] = op.failed.status
			answer["error"] = map[string]any{"errors": []any{map[string]string{"code": op.failed.reason, "message": op.failed.message}}}
		}
		return answer, nil
	}
	return nil, failed(http.StatusNotFound, "notFound", "The resource 'projects/%s/global/operations/%s' was not found", Project, name)
}
